"""The engines of one weight sync, as the controller sees them: those that fail drop out, the others go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import ray

Pending = dict[str, ray.ObjectRef]
"""Calls under way, by engine."""


class Engine(Protocol):
    """The client of an engine's actor."""

    name: str

    def start(self, method: str, *arguments: Any) -> ray.ObjectRef:
        """Call a method of the actor; returns at once."""
        ...


class Recipients:
    """Calls all engines that have not failed, and remembers why the others did."""

    def __init__(self, engines: Sequence[Engine], *, timeout_s: float) -> None:
        self._engines = list(engines)
        self._timeout = timeout_s
        self.errors: dict[str, Exception] = {}
        """What engines failed with, by name."""

    @property
    def engines(self) -> list[Engine]:
        """Those that have not failed."""
        return [engine for engine in self._engines if engine.name not in self.errors]

    def start(self, method: str, *arguments: Any) -> Pending:
        """The same call to every engine."""
        return self.start_each(method, lambda engine: arguments)

    def start_each(self, method: str, arguments: Callable[[Engine], tuple[Any, ...]]) -> Pending:
        """A call to every engine with arguments of its own."""
        return {engine.name: engine.start(method, *arguments(engine)) for engine in self.engines}

    def wait(self, pending: Pending | None, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Results by engine, of those that did not fail."""
        results = {}
        deadline = time.monotonic() + (timeout_s or self._timeout)
        for name, reference in (pending or {}).items():
            try:
                results[name] = ray.get(reference, timeout=max(0.0, deadline - time.monotonic()))
            except ray.exceptions.RayTaskError as error:
                self.fail(name, error.cause if isinstance(error.cause, Exception) else error)
            except ray.exceptions.GetTimeoutError:
                self.fail(name, TimeoutError(f"no answer within {timeout_s or self._timeout:g} s"))
            except ray.exceptions.RayError as error:
                self.fail(name, error)
        return results

    def broken(self, pending: Pending) -> bool:
        """Whether one of these calls has failed; does not wait."""
        ready, _ = ray.wait(list(pending.values()), num_returns=len(pending), timeout=0)
        done = {name: reference for name, reference in pending.items() if reference in ready}
        before = len(self.errors)
        self.wait(done)
        return len(self.errors) > before

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
        """Tell every engine that the sync died at its source; their gates stay shut. Never raises."""
        self.wait(self.start("fail_update", version, reason))
