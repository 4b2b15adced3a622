"""What of the job is on this node: ranks, GPUs."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress


def ranks_in_all_and_here() -> tuple[int, int]:
    """As torchrun says; 1 and 1 in a process that it did not start, where vLLM may have set LOCAL_WORLD_SIZE alone."""
    if "WORLD_SIZE" not in os.environ:
        return 1, 1
    ranks = int(os.environ["WORLD_SIZE"])
    return ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks))


def listed_gpus() -> int:
    """GPUs that the driver lists, whether this process may use them or not; 0 without a driver."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
        return sum(line.startswith("GPU") for line in done.stdout.splitlines())
    return 0
