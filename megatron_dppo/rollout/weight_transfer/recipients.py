"""The engines of one weight sync, as the controller sees them: those that fail drop out, the others go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Protocol

from megatron_dppo.rollout.engine import EngineClient, RolloutEngine

type Pending[T] = dict[str, Future[T]]
"""Calls under way, by engine."""


class Recipients:
    """Calls all engines that have not failed, and remembers why the others did."""

    def __init__(self, engines: Sequence[EngineClient], *, timeout_s: float) -> None:
        self._engines = list(engines)
        self._timeout = timeout_s
        self.errors: dict[str, Exception] = {}
        """What engines failed with, by name."""

    @property
    def engines(self) -> list[EngineClient]:
        """Those that have not failed."""
        return [engine for engine in self._engines if engine.name not in self.errors]

    def ask[T](self, call: Callable[[RolloutEngine], T]) -> Pending[T]:
        """The same call to every engine, behind those that were made before; see `EngineClient.ask`."""
        return self.ask_each(lambda engine: call)

    def ask_each[T](self, call_for: Callable[[EngineClient], Callable[[RolloutEngine], T]]) -> Pending[T]:
        """A call of its own to every engine."""
        return {engine.name: engine.ask(call_for(engine), "weights") for engine in self.engines}

    def wait[T](self, pending: Pending[T] | None, *, timeout_s: float | None = None) -> dict[str, T]:
        """Results by engine, of those that did not fail."""
        results = {}
        limit = timeout_s or self._timeout
        deadline = time.monotonic() + limit
        for name, future in (pending or {}).items():
            try:
                results[name] = future.result(max(0.0, deadline - time.monotonic()))
            except Exception as error:
                self.fail(name, error if future.done() else TimeoutError(f"no answer within {limit:g} s"))
        return results

    def broken[T](self, pending: Pending[T]) -> bool:
        """Whether one of these engines has failed, by this call or before; does not wait."""
        self.wait({name: future for name, future in pending.items() if future.done()})
        return not self.errors.keys().isdisjoint(pending)

    def fail(self, name: str, error: Exception) -> None:
        """Leave an engine out from here on."""
        self.errors.setdefault(name, error)

    def fail_all(self, error: Exception) -> None:
        """Nobody can be served any more."""
        for engine in self.engines:
            self.fail(engine.name, error)

    def forgive(self, names: Collection[str]) -> None:
        """Take engines back in."""
        for name in names:
            self.errors.pop(name, None)

    def give_up(self, version: int, reason: str) -> None:
        """Tell every engine that the sync died at its source; they refuse to generate. Never raises."""
        self.wait(
            {
                engine.name: engine.ask(lambda one: one.abandon_update(version, reason), "control")
                for engine in self.engines
            }
        )


class WeightSender(Protocol):
    """Brings every bucket to every engine; every rank has one. Collective over the trainer; `to` on the controller,
    rank 0, alone."""

    def prepare(self) -> None:
        """Before optimizer state is on its way to the host: what would wait for it. Here nothing does. `send` does it
        otherwise."""
        return

    def begin(self, version: int, to: Recipients | None) -> None:
        """Have the engines open an update (`RolloutEngine.begin_update`), and wait for it; what can be prepared here is
        meanwhile. Before `send`; the weights stay as they are from here on."""
        if to is not None:
            to.wait(to.ask(lambda engine: engine.begin_update(version)))

    def send(self, version: int, to: Recipients | None) -> dict[int, int]:
        """Returns checksums by bucket, on every rank, which every worker's must equal."""
        ...

    def close(self) -> None:
        """Let go of what stays open between syncs; here nothing does."""
        return
