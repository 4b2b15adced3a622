"""Training ranks that wait for the controller, and meanwhile bring weights to engines that were started again."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from megatron_dppo.actor.runtime import Runtime
from megatron_dppo.rollout.errors import EnginesFailed
from megatron_dppo.rollout.fleet import EngineFleet
from megatron_dppo.trainer.weight_sync import WeightSync

_LOOK_S, _WORD_S = 0.2, 15.0
"""Between two looks at the engines; between two words to the ranks, which give a collective up that takes too long."""


class RolloutsStopped(RuntimeError):
    """Engines failed too often; raised on every rank, with the controller's reason."""


@dataclass(frozen=True)
class _Wait:
    """Nothing yet."""


@dataclass(frozen=True)
class _Bring:
    """Everybody brings the weights to engines that do not have them."""


@dataclass(frozen=True)
class _Stop:
    reason: str


@dataclass(frozen=True)
class _Have:
    """What everybody waited for."""

    value: Any


class Assembly:
    """Weights are sharded over all ranks, so an engine that is replaced while the controller waits for rollouts needs
    all of them. Every rank has one of these and waits in `wait_for`."""

    def __init__(self, runtime: Runtime, weights: WeightSync, fleet: EngineFleet | None) -> None:
        self._runtime, self._weights, self._fleet = runtime, weights, fleet
        self._version = 0
        self.drained_s = 0.0
        """Seconds for which the last sync waited for responses that were under way."""

    def sync(self, version: int) -> dict[str, float]:
        """The actor's weights to all engines, as `version`. Collective. Returns metrics."""
        self._version = version
        start, found = time.perf_counter(), None
        if self._fleet is not None:
            threads = ThreadPoolExecutor(1, thread_name_prefix="weight-sync")
            found = threads.submit(self._fleet.members_to_sync, version)
            threads.shutdown(wait=False)
        self._together(found, share=False)
        self.drained_s = time.perf_counter() - start
        return {"sync/drain_s": self.drained_s} | self._sync(None if found is None else found.result())

    def wait_for[T](self, found: Future[T] | None) -> T:
        """The controller's result, on every rank (`found` is None on the others). Collective: a broadcast of it, and of
        a word before each sync and now and then. Raises `RolloutsStopped` on every rank, any other error on the
        controller alone."""
        return self._together(found, share=True)

    def _together(self, found: Future[Any] | None, *, share: bool) -> Any:
        """`wait_for`, or only the end of it (`share=False`), during which no weights can be brought."""
        if self._fleet is None or found is None:
            return self._follow()
        spoke = time.monotonic()
        while not wait([found], timeout=_LOOK_S).done:
            if time.monotonic() - spoke > _WORD_S:
                self._runtime.broadcast(_Wait())
                spoke = time.monotonic()
            if share and (members := self._behind(self._fleet)):
                self._runtime.broadcast(_Bring())
                self._sync(members)
                spoke = time.monotonic()
        try:
            value = found.result()
        except EnginesFailed as error:
            self._runtime.broadcast(_Stop(str(error)))
            raise RolloutsStopped(str(error)) from error
        self._runtime.broadcast(_Have(value if share else None))
        return value

    def _follow(self) -> Any:
        while True:
            word: _Wait | _Bring | _Stop | _Have | None = self._runtime.broadcast(None)
            if isinstance(word, _Have):
                return word.value
            if isinstance(word, _Stop):
                raise RolloutsStopped(word.reason)
            if isinstance(word, _Bring):
                self._sync(None)

    def _sync(self, members: list[Any] | None) -> dict[str, float]:
        report = self._weights.sync(self._version, members)
        if self._fleet is not None and members is not None:
            self._fleet.synced(self._version, members, report.failed)
        return report.metrics

    @staticmethod
    def _behind(fleet: EngineFleet) -> list[Any]:
        try:
            return fleet.members_behind()
        except EnginesFailed:  # the work that is waited for says so too
            return []
