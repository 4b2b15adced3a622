"""torch's store of an engine, on the address that its address says.

vLLM's workers meet at `tcp://127.0.0.1:PORT`, or at a node's address; the store that torch makes there for the first of
them listens on all interfaces whatever that says, and torch has no option for it.
"""

from __future__ import annotations

import importlib
import urllib.parse
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch.distributed.constants import default_pg_timeout

from megatron_dppo.launch.network import bound_store

_HANDLERS = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
_THEIRS = _HANDLERS["tcp"]


def bind_stores() -> None:
    """From now on, in this process. Idempotent."""
    _HANDLERS["tcp"] = _bound


def _bound(url: str, timeout: timedelta = default_pg_timeout, **options: Any) -> Iterator[Any]:
    parts = urllib.parse.urlparse(url)
    asked = dict(urllib.parse.parse_qsl(parts.query))
    if asked.get("rank") == "0" and parts.hostname and parts.port:
        try:
            store = bound_store(parts.hostname, parts.port, timeout=timeout)
        except OSError:  # the address of something before this machine
            pass
        else:
            yield store, 0, int(asked["world_size"])
            return
    yield from _THEIRS(url, timeout=timeout, **options)
