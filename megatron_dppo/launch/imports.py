"""Shorter imports."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Import inside without Python's garbage collector.

    Importing torch, Megatron-Core or vLLM makes a million objects that stay, and the collector looks through them again
    and again: a fifth of ten seconds, in every rank and engine.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
