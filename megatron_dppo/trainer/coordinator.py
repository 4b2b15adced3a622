"""Training ranks that wait for the controller, hear of its failures, and meanwhile bring weights to engines that were
started again.

```
rank 0       a thread does the work ── looks every 0.2 s ─► done? ─ _Have ─┐     an engine without weights? ─ _Bring ─┐
other ranks  _follow: wait for a word ◄── _Wait every 15 s ◄───────────────┘     all ranks sync, then wait again ◄────┘
```
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from megatron_dppo.actor.runtime import Runtime
from megatron_dppo.errors import UserError
from megatron_dppo.rollout.engine import EngineClient, RolloutFleet
from megatron_dppo.trainer.weight_sync import WeightSync

_LOOK_S, _WORD_S = 0.2, 15.0
"""Between two looks at the engines; between two words to the ranks, which give a collective up that takes too long."""


class ControllerFailed(RuntimeError):
    """What the controller failed with, on the other ranks; its traceback is the cause."""


@dataclass(frozen=True)
class _Wait:
    """Nothing yet."""


@dataclass(frozen=True)
class _Bring:
    """Everybody brings the weights to engines that do not have them."""


@dataclass(frozen=True)
class _Stop:
    """The controller failed, and everybody ends."""

    reason: str
    by_user: bool
    """Whether it is a `UserError`."""
    trace: str


@dataclass(frozen=True)
class _Have:
    """What everybody waited for."""

    value: Any


class RankCoordinator:
    """Weights are sharded over all ranks, so an engine that is replaced while the controller waits for rollouts needs
    all of them. Every rank has one of these and waits in `wait_for`.

    Whatever the controller fails with while the others wait, or did by itself before (`alone`), is raised on all ranks
    at the same place: the error itself on the controller, a `UserError` or `ControllerFailed` that tells it elsewhere.
    """

    def __init__(self, runtime: Runtime, weights: WeightSync, fleet: RolloutFleet | None) -> None:
        self._runtime, self._weights, self._fleet = runtime, weights, fleet
        self._version = 0
        self._failure: Exception | None = None
        """What the controller failed with by itself, of which the others do not know yet."""
        self.told = False
        """Whether all ranks were told of a failure, and raised it."""
        self.drained_s = 0.0
        """Seconds for which the last sync waited for responses that were under way."""

    def sync(self, version: int) -> dict[str, float]:
        """The actor's weights to all engines, as `version`. Collective. Returns metrics."""
        self._version = version
        start, found = time.perf_counter(), None
        if self._fleet is not None:
            fleet = self._fleet
            found = meanwhile(lambda: fleet.members_to_sync(version))
        members = self._together(found, share=False, refill=False)
        self.drained_s = time.perf_counter() - start
        return {"sync/drain_s": self.drained_s} | self._sync(members)

    def wait_for[T](self, found: Future[T] | None) -> T:
        """The controller's result, on every rank (`found` is None on the others). Collective: a broadcast of it, and of
        a word before each sync and now and then."""
        return self._together(found, share=True, refill=True)

    def wait_until_done[T](self, found: Future[T] | None) -> T | None:
        """`wait_for`; the result stays with the controller."""
        return self._together(found, share=False, refill=True)

    def settle(self) -> None:
        """Raise on all ranks what the controller failed with by itself. Collective."""
        self._together(meanwhile(lambda: None) if self._fleet is not None else None, share=False, refill=False)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """For what the controller does by itself. The other ranks are on their way to the next place where all meet, so
        an error is kept, and raised there."""
        try:
            yield
        except Exception as error:
            self._failure = self._failure or error

    def _together(self, found: Future[Any] | None, *, share: bool, refill: bool) -> Any:
        """
        share   whether all ranks get the result
        refill  whether engines may be brought weights meanwhile
        """
        if self._fleet is None or found is None:
            return self._follow()
        if self._failure is None:
            self._watch(found, refill)
            self._failure = self._failure or _failure_of(found)
        if self._failure is not None:
            error = self._failure
            trace = "".join(traceback.format_exception(error))
            with suppress(Exception):  # ranks may be gone as well; this came first
                self._runtime.broadcast(_Stop(_said(error), isinstance(error, UserError), trace))
                self.told = True
            raise error
        value = found.result()
        self._runtime.broadcast(_Have(value if share else None))
        return value

    def _watch(self, found: Future[Any], refill: bool) -> None:
        """Wait, and let the others know that there is nothing yet, or weights to bring."""
        assert self._fleet is not None
        spoke = time.monotonic()
        while not wait([found], timeout=_LOOK_S).done:
            if time.monotonic() - spoke > _WORD_S:
                self._runtime.broadcast(_Wait())
                spoke = time.monotonic()
            if refill and (members := self._behind(self._fleet)):
                self._runtime.broadcast(_Bring())
                self._sync(members)
                spoke = time.monotonic()

    def _follow(self) -> Any:
        while True:
            word: _Wait | _Bring | _Stop | _Have | None = self._runtime.broadcast(None)
            if isinstance(word, _Have):
                return word.value
            if isinstance(word, _Stop):
                self.told = True
                if word.by_user:
                    raise UserError(word.reason)
                raise ControllerFailed(f"on rank 0: {word.reason}") from RuntimeError(f"on rank 0:\n{word.trace}")
            if isinstance(word, _Bring):
                self._sync(None)

    def _sync(self, members: Sequence[EngineClient] | None) -> dict[str, float]:
        report = self._weights.sync(self._version, members)
        if self._fleet is not None and members is not None:
            with self.alone():
                self._fleet.synced(self._version, members, report.failed)
        return report.metrics

    @staticmethod
    def _behind(fleet: RolloutFleet) -> Sequence[EngineClient]:
        try:
            return fleet.members_behind()
        except Exception:  # the fleet has ended; the work that is waited for says why
            return []


def meanwhile[T](call: Callable[[], T]) -> Future[T]:
    """A call in a thread of its own."""
    threads = ThreadPoolExecutor(1)
    found = threads.submit(call)
    threads.shutdown(wait=False)
    return found


def _failure_of(found: Future[Any]) -> Exception | None:
    error = found.exception()
    if error is None or isinstance(error, Exception):
        return error
    failure = RuntimeError(f"ended by {error!r}")  # somebody's code calls sys.exit()
    failure.__cause__ = error
    return failure


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
