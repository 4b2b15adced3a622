"""A thread to which everything is an event: what it alone changes needs no lock."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import ray

from megatron_dppo.rollout.engine import EngineClosed

_TICK_S = 0.2

type Event = Callable[[], None]


class EventThread:
    """Calls events one after another, in the order in which they were put, until `end`."""

    def __init__(
        self, name: str, *, after_each: Callable[[], None], at_the_end: Callable[[BaseException], None]
    ) -> None:
        """
        after_each  called after every event, and now and then without one; an error there or in an event is the end
        at_the_end  called once, with the reason
        """
        self._after_each, self._at_the_end = after_each, at_the_end
        self.end_reason: BaseException | None = None
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        self._thread.join()

    def put(self, event: Event) -> None:
        """Have an event called; returns at once."""
        self._events.put(event)

    def ask[T](self, question: Callable[[], T]) -> T:
        """Call a function there and wait. Raises what it raised, or why the thread has ended."""
        answer: Future[T] = Future()

        def settle() -> None:
            try:
                answer.set_result(question())
            except BaseException as error:
                answer.set_exception(error)

        self._events.put(settle)
        while True:
            try:
                return answer.result(timeout=1.0)
            except TimeoutError:
                if answer.done():  # the question's own
                    raise
                if not self.alive:
                    raise self.end_reason or EngineClosed("the engines are closed") from None

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds there. Raises why the thread has ended."""

        def asked() -> bool:
            if self.end_reason is not None:
                raise self.end_reason
            return condition()

        while not self.ask(asked):
            time.sleep(0.01)

    def watch(self, reference: ray.ObjectRef, then: Callable[[Future[Any]], None]) -> None:
        """Have `then` called when a result is there."""
        reference.future().add_done_callback(lambda result: self._events.put(lambda: then(result)))

    def end(self, reason: BaseException) -> None:
        """The last event; on this thread."""
        self.end_reason = reason
        self._at_the_end(reason)

    def _run(self) -> None:
        while self.end_reason is None:
            try:
                event = self._events.get(timeout=_TICK_S)
            except queue.Empty:
                event = None
            try:
                if event is not None:
                    event()
                self._after_each()
            except BaseException as error:
                self.end(error)
        while True:  # whoever asked meanwhile gets an answer
            try:
                self._events.get_nowait()()
            except queue.Empty:
                return
            except Exception:  # an event about an engine that no longer matters
                continue
