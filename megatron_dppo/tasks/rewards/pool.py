"""Rewards that run in worker processes, a function of the user's among them: each answer has its time, its limits, and
no more."""

from __future__ import annotations

import inspect
import math
import numbers
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron_dppo.launch.imports import load_callable, look_first_in
from megatron_dppo.tasks.rewards.verdict import Answered, Verdict
from megatron_dppo.tasks.workers.calls import Call, Handler, Hosted, Outcome
from megatron_dppo.tasks.workers.sandbox import require, rung
from megatron_dppo.tasks.workers.workers import Workers, printable


class Verifier(Protocol):
    """What a worker runs: plain data that can be pickled, with the code beside it."""

    @property
    def evaluates(self) -> bool:
        """It may run what a model wrote as code: such a verifier works in a process for each answer, and nowhere where
        no sandbox holds."""
        ...

    def prepare(self) -> None: ...

    def __call__(self, item: Answered) -> Verdict: ...


@dataclass(frozen=True)
class TimedVerifier:
    """A verifier, and how it is held."""

    verifier: Verifier
    timeout_s: float
    """Seconds after which its process is killed."""
    bounds: tuple[float, float] = (0.0, 1.0)
    """A score outside is none."""
    sandboxed: bool = True
    """See `workers.sandbox`."""
    environment: tuple[str, ...] = ()
    """Variables that it sees besides those of `sandbox.ENVIRONMENT`."""
    readable: tuple[str, ...] = ()
    """Files and folders that it reads, besides code."""


class VerifierPool(Protocol):
    """Where verifiers run: `LocalVerifierPool` on this machine, `RayVerifierPool` on the nodes of a Ray cluster."""

    def verify(self, tasks: Sequence[tuple[str, Answered]]) -> list[Verdict]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class _VerifierService:
    """A verifier as a service of the workers; its verdicts as JSON."""

    verifier: Verifier

    def prepare(self) -> None:
        self.verifier.prepare()

    def open(self, opening: Any) -> Handler:
        return lambda item: vars(self.verifier(item))


class LocalVerifierPool:
    """Runs verifiers in `workers` workers. What takes too long for one answer is killed; the others go on meanwhile, so
    `verify` takes at most the time limits divided among the workers. Verifiers in the sandbox and those outside it, and
    those that see different variables, have workers of their own, which start with the first answer for them or, where
    they run a function of the user's, with `prepare`.
    """

    def __init__(self, verifiers: Mapping[str, TimedVerifier], *, workers: int, memory_mib: int) -> None:
        """Raises UserError where a verifier needs a sandbox and the machine has none."""
        self._verifiers = dict(verifiers)
        kinds: dict[tuple[bool, tuple[str, ...]], dict[str, Hosted]] = {}
        for name, timed in verifiers.items():
            if timed.sandboxed and timed.verifier.evaluates:
                require(f"task.rewards: {name}", "set sandbox: none in the entry")
            single = timed.sandboxed and timed.verifier.evaluates
            sandboxed = timed.sandboxed and rung() != "none"
            hosted = Hosted(_VerifierService(timed.verifier), sandboxed, single, timed.readable)
            kinds.setdefault((timed.sandboxed, timed.environment), {})[name] = hosted
        self._workers = {
            name: made
            for (_, environment), services in kinds.items()
            for made in [Workers(services, size=workers, memory_mib=memory_mib, environment=environment)]
            for name in services
        }

    def prepare(self) -> None:
        """Import the functions of the user's, in a worker that is kept. Raises as `verify` does."""
        for name, timed in self._verifiers.items():
            if isinstance(timed.verifier, CustomVerifier):
                self._workers[name].prepare()

    def verify(self, tasks: Sequence[tuple[str, Answered]]) -> list[Verdict]:
        """The verdicts on `(name of the verifier, item)`, in order.

        Raises UserError where a verifier cannot be loaded, RuntimeError where workers do not start.
        """
        verdicts: dict[int, Verdict] = {}
        for workers in dict.fromkeys(self._workers[name] for name, _ in tasks):
            mine = [number for number, (name, _) in enumerate(tasks) if self._workers[name] is workers]
            calls = [Call(name, name, item, self._verifiers[name].timeout_s) for name, item in (tasks[n] for n in mine)]
            for number, outcome in zip(mine, workers.run(calls), strict=True):
                verdicts[number] = read_verdict(outcome, self._verifiers[tasks[number][0]].bounds)
        return [verdicts[number] for number in range(len(tasks))]

    def close(self) -> None:
        """End all workers. The pool starts new ones if it is used again."""
        for workers in dict.fromkeys(self._workers.values()):
            workers.close()


def read_verdict(outcome: Outcome, bounds: tuple[float, float]) -> Verdict:
    """What a process said as a verdict, or as an error where it is none: a stranger may have said it."""
    if outcome.reply is None:
        return Verdict(score=0.0, error=outcome.error, timed_out=outcome.timed_out)
    reply, (low, high) = outcome.reply, bounds
    kinds = {"score": float, "well_formed": bool, "error": str, "timed_out": bool}
    if {name: type(value) for name, value in reply.items()} != kinds:
        return Verdict(score=0.0, error="what its process answered is no verdict")
    if reply["error"]:
        error = printable(reply["error"])
        return Verdict(score=0.0, well_formed=reply["well_formed"], error=error, timed_out=reply["timed_out"])
    score = reply["score"]
    if not math.isfinite(score) or not low <= score <= high:
        error = f"the score {score:g} is outside of its bounds [{low:g}, {high:g}]; a python reward may set bounds"
        return Verdict(score=0.0, error=error)
    return Verdict(score=score, well_formed=reply["well_formed"])


@dataclass(frozen=True)
class CustomVerifier:
    """`path` is `package.module:callable` or `file.py:callable`, see `PythonReward`; modules and files are looked for
    in `folder` first."""

    path: str
    folder: str = field(default_factory=os.getcwd)

    evaluates = True
    """For all that is known of it."""

    @property
    def file(self) -> Path | None:
        name, _, _ = self.path.rpartition(":")
        return Path(self.folder, name).resolve() if name.endswith(".py") else None

    def prepare(self) -> None:
        """Raises UserError where there is no such callable."""
        look_first_in(self.folder)
        self._function()

    def _function(self) -> Callable[..., Any]:
        return load_callable(self.path, named="the reward ", folder=self.folder)

    def __call__(self, item: Answered) -> Verdict:
        """A function that raises or returns no finite number gives no score; the response may be to blame, so that is
        counted."""
        function = self._function()
        try:
            score = function(
                question=item.question,
                reference=item.reference,
                response=item.response,
                answer=item.answer,
                metadata=dict(item.metadata),
                **_asked_for(function, tokens=item.tokens, truncated=item.truncated),
            )
        except Exception as error:
            return Verdict(score=0.0, error=f"{self.path} raised {type(error).__name__}: {error}")
        if not isinstance(score, numbers.Real | np.bool_):
            said = f"{self.path} returned {score!r:.60} ({type(score).__name__}) for the question {item.question!r:.60}"
            return Verdict(score=0.0, error=f"{said}; it must return a number")
        if not math.isfinite(score):
            return Verdict(score=0.0, error=f"{self.path} returned {float(score)}")
        return Verdict(score=float(score))


def _asked_for(function: Callable[..., Any], **more: Any) -> dict[str, Any]:
    """Of `more` what a function takes by its name. What `**` takes may go on to one that knows the others alone."""
    return {name: value for name, value in more.items() if _takes(function, name)}


def _takes(function: Callable[..., Any], name: str) -> bool:
    try:
        taken = inspect.signature(function, follow_wrapped=False).parameters
    except (TypeError, ValueError):  # compiled code need not say what it takes
        return False
    if name in taken:
        return taken[name].kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    hands_on = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values())
    inner = getattr(function, "__wrapped__", None)  # of a decorator's function, what it calls
    return hands_on and inner is not None and _takes(inner, name)
