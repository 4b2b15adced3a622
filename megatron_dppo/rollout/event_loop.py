"""asyncio for callers that block: an event loop on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from megatron_dppo.rollout.engine import EngineClosed, EngineDead


class EventLoop:
    """Where an engine's coroutines run. Methods may be called from any thread but its own."""

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
        """Wait for a coroutine. Raises what it raised, `TimeoutError` after `timeout` seconds, and `EngineDead` where
        vLLM's core is gone."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout)
        except BaseException as error:
            future.cancel()
            if type(error).__name__ == "EngineDeadError":  # by name: whoever unpickles ours needs no vLLM
                raise EngineDead(str(error)) from None
            raise

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        """Have a function called there soon; nobody waits for it."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def stop(self) -> None:
        """Cancel what still runs, and end the thread."""
        with suppress(TimeoutError):
            self.run(_end_tasks(), timeout=5.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _end_tasks() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
