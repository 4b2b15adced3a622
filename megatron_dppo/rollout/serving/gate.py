"""Which weights a request is sampled from, and when none may be."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_dppo.rollout.engine import EngineClosed


class Gate:
    """Requests are inside while the core samples them; the weights change only while nobody is.

    So the version read on entering is that of every token sampled inside. Attributes may be set from any thread; who
    enters and leaves does so on the engine's event loop.
    """

    def __init__(self, shut: str | None) -> None:
        self.shut = shut
        """Why nobody may enter; None while the gate is open."""
        self.syncing = False
        """Whether it is shut for a weight sync that may still end well: who was cut for it waits to go on."""
        self.version = 0
        """Version of the weights behind the gate."""
        self.asleep: set[str] = set()
        """What the engine gave back of its memory and has not taken again: "weights", "kv_cache"."""
        self._inside = 0

    def check(self) -> None:
        """Raise `EngineClosed` where nothing may be sampled now."""
        if self.shut is not None:
            raise EngineClosed(f"the engine refuses to generate: {self.shut}")
        if self.asleep:
            raise EngineClosed(f"the engine refuses to generate: its {' and '.join(sorted(self.asleep))} are asleep")

    async def passable(self) -> None:
        """Wait for the end of a sync. Raises `EngineClosed` where the gate is shut for another reason."""
        while self.shut is not None:
            if not self.syncing:
                raise EngineClosed(f"the engine refuses to generate: {self.shut}")
            await asyncio.sleep(0.01)

    @contextmanager
    def inside(self) -> Iterator[int]:
        """Be inside; gives the version of the weights. Only after `passable`, without an `await` in between."""
        self._inside += 1
        try:
            yield self.version
        finally:
            self._inside -= 1

    async def emptied(self) -> None:
        """Wait until nobody is inside."""
        while self._inside:
            await asyncio.sleep(0.005)
