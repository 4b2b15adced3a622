"""How many of the job's ranks are on this node."""

from __future__ import annotations

import os


def ranks_in_all_and_here() -> tuple[int, int]:
    """As torchrun says; 1 and 1 in a process that it did not start, where vLLM may have set LOCAL_WORLD_SIZE alone."""
    if "WORLD_SIZE" not in os.environ:
        return 1, 1
    ranks = int(os.environ["WORLD_SIZE"])
    return ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
