"""asyncio for callers that block: an event loop on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from megatron_dppo.rollout.engine import EngineClosed

_LOOK_S = 1.0
"""How often a caller looks whether the loop has ended under it."""


class EventLoop:
    """What runs here needs no lock against anything else that does. Methods are for any thread but its own."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        return self._loop.is_closed()

    def check(self) -> None:
        """Raise `EngineClosed` after `stop`."""
        if self.closed:
            raise EngineClosed("the engine is closed")

    def run[T](self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Wait for a coroutine. Raises what it raised, `TimeoutError` after `timeout` seconds, and `EngineClosed` where
        the loop has ended."""
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:
            coroutine.close()
            raise EngineClosed("the engine is closed") from None
        try:
            if timeout is not None:
                return future.result(timeout)
            while True:
                try:
                    return future.result(_LOOK_S)
                except TimeoutError:
                    if future.done():  # the coroutine's own
                        raise
                    self.check()
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        """Have a function called there soon; nobody waits for it. Nothing happens after `stop`."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def stop(self) -> None:
        """Cancel what still runs, and end the thread. One that does not come back from a call is left behind."""
        with suppress(TimeoutError):
            self.run(_end_tasks(), timeout=5.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=30.0)
        if not self._thread.is_alive():
            self._loop.close()


async def _end_tasks() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
