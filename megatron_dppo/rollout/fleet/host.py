"""A Ray actor that holds an engine, and its client on the controller.

```
controller ── ask(call, lane) ──► EngineHost.run(call), in a thread of the lane ──► the engine
     ◄──────────── a Future ◄──────────────── what it returned or raised
```
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import ray

from megatron_dppo.errors import UserError, raise_cause
from megatron_dppo.launch.imports import uncollected
from megatron_dppo.rollout.engine import EngineDead, Lane, RolloutEngine

THREADS: Mapping[Lane, int] = {"work": 256, "weights": 1, "control": 8}
"""Of each lane. Generation may take all of its own; one thread keeps the order of calls."""
_ERROR_CHARACTERS = 500


class EngineHost:
    """Runs in a Ray worker. Nothing that the engine made is lost with it: results belong to who asked for them."""

    def __init__(self, make: Callable[[], RolloutEngine], environment: Mapping[str, str], log: str | None) -> None:
        os.environ.update(environment)  # before anything looks for devices
        before = None if log is None else _print_to(log)
        self._refused: UserError | None = None
        try:
            with uncollected():
                self._engine = make()  # the engine's library is imported in this process only
        except UserError as error:
            # For the first call: of an error that ends a constructor Ray hands on the text alone, and a process that
            # died would be started again, with the same configuration.
            self._refused = error
        except RuntimeError as error:
            # A library may say of a core that failed no more than that it did; the reason is what the core printed.
            where, why = "what it printed is in the logs of Ray's workers there", str(error)
            if log is not None and before is not None:
                where, why = f"what it printed is in {log}", f"{error}{_printed_error(log, before)}"
            raise EngineDead(f"the engine did not start on {socket.gethostname()} ({why}); {where}") from error

    def run(self, call: Callable[[RolloutEngine], Any]) -> Any:
        if self._refused is not None:
            raise self._refused
        return call(self._engine)

    def kill_core(self) -> None:
        """End every process below this one, also one that is stopped and would not notice that its parent ended."""
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()


class RemoteEngine:
    """The `EngineClient` of an engine in an `EngineHost`. Needs a connected `RaySession`.

    The constructor returns at once, so that the engine loads while the trainer builds its model; calls wait for it.
    """

    def __init__(
        self,
        make: Callable[[], RolloutEngine],
        *,
        name: str,
        options: Mapping[str, Any] | None = None,
        log: Path | None = None,
    ) -> None:
        """
        make     called where the engine is to live
        name     of the Ray actor, unique in the session
        options  further options of the Ray actor: GPUs, placement group; and `environment`, variables that it sets for
                 the engine (Ray's own way of setting them needs another process on every node)
        log      file that the engine's processes print to, where its node can write it; None leaves that to Ray
        """
        self.name = name
        placed = {"num_cpus": 0, "num_gpus": 0} | dict(options or {})
        environment = placed.pop("environment", {})
        threaded: Any = ray.remote(concurrency_groups=dict(THREADS))
        host = threaded(EngineHost).options(name=name, max_restarts=0, **placed)
        self._host: Any = host.remote(make, environment, None if log is None else str(log.absolute()))
        self._closed = False
        self.started = self.ask(lambda engine: engine.weight_version, "control")
        """Done when the engine can generate, or failed as its start-up did."""

    def ask[T](self, call: Callable[[RolloutEngine], T], lane: Lane) -> Future[T]:
        """See `EngineClient.ask`."""
        return future_of(self._host.run.options(concurrency_group=lane).remote(call))

    def ask_for_parts(self, call: Callable[[RolloutEngine], tuple[Any, ...]], count: int) -> list[ray.ObjectRef]:
        """A call of the lane "work" that returns `count` values, each an object of its own in Ray's store. They belong
        to the caller and outlive the engine."""
        return self._host.run.options(concurrency_group="work", num_returns=count).remote(call)

    def close(self) -> None:
        """Stop the engine's processes and the actor. Idempotent; never raises for an actor that is gone."""
        # An engine that is still loading cannot answer; killing its worker takes the core with it.
        self._end(lambda: self._host.run.options(concurrency_group="weights").remote(lambda engine: engine.close()), 30)

    def kill(self, grace_s: float = 5.0) -> None:
        """End an engine that may be dead, hung or stopped; asks nothing of it but to end its core. Never raises."""
        self._end(lambda: self._host.kill_core.options(concurrency_group="control").remote(), grace_s)

    def _end(self, last_call: Callable[[], ray.ObjectRef], grace_s: float) -> None:
        # When the session is over the actor is gone with it; a call would start another Ray.
        if self._closed or not ray.is_initialized():
            return
        self._closed = True
        try:
            if self.started.done():
                with suppress(ray.exceptions.RayError):  # it is gone already, or will be
                    ray.get(last_call(), timeout=grace_s)
        finally:
            ray.kill(self._host)


def future_of(reference: ray.ObjectRef) -> Future[Any]:
    """The result behind a reference, without Ray's wrapping of errors: raises what the call raised, and `EngineDead`
    where the actor is gone."""
    result: Future[Any] = Future()

    def settle(done: Future[Any]) -> None:
        try:
            result.set_result(done.result())
        except ray.exceptions.RayTaskError as error:
            try:
                raise_cause(error)
            except Exception as cause:
                result.set_exception(cause)
        except ray.exceptions.RayActorError as error:
            lines = str(error).strip().splitlines()
            # Of a constructor that failed Ray says where first, and what was wrong in the last line.
            said = f"{lines[-1].strip()}\n{error}" if "creation task" in lines[0] else str(error)
            result.set_exception(EngineDead(f"the rollout engine's process is gone: {said}"))
        except BaseException as error:
            result.set_exception(error)

    reference.future().add_done_callback(settle)
    return result


def _print_to(log: str) -> int | None:
    """Let this process and those it starts print to the end of a file, which outlives Ray's own ones. The file's size
    before; None where it cannot be written: a node of engines alone may not have the run's folder."""
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        return None
    for stream in (1, 2):
        os.dup2(file, stream)
    before = os.fstat(file).st_size
    os.close(file)
    return before


def _printed_error(log: str, start: int) -> str:
    """The last error that was printed behind the first `start` bytes, without what a logger sets before it, as the end
    of a line; nothing where there is none."""
    with suppress(OSError), open(log, errors="replace") as file:
        file.seek(start)
        error = r"(?:^|\s)((?:\w+\.)*\w+(?:Error|Exception|Interrupt)\b(?:: .*)?)$"
        if found := re.findall(error, file.read(), re.MULTILINE):
            return f" The last error it printed: {found[-1][:_ERROR_CHARACTERS]}"
    return ""
