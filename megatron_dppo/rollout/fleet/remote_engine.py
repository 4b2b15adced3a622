"""The controller's client of one engine in a Ray actor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import ray

from megatron_dppo.batch import RolloutBatch
from megatron_dppo.errors import raise_cause
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.engine import EngineDead, GenerationRequest, SamplingLaw
from megatron_dppo.rollout.fleet.host import CONCURRENCY_GROUPS, EngineActor


class RayRolloutEngine:
    """A `RolloutEngine` whose work happens in a Ray actor. Needs a connected `RaySession`.

    The constructor returns at once, so that the engine loads while the trainer builds its model; the first call waits
    for it, or `wait_until_ready` does.
    """

    def __init__(
        self,
        model: Path,
        config: RolloutConfig,
        *,
        name: str = "rollout-engine",
        options: Mapping[str, Any] | None = None,
        log: Path | None = None,
    ) -> None:
        """
        name     of the Ray actor, unique in the session
        options  further options of the Ray actor: GPUs, placement group; and `environment`, variables that it sets for
                 the engine (Ray's own way of setting them needs another process on every node)
        log      file that the engine's processes print to, where its node can write it; None leaves that to Ray
        """
        self._config = config
        self.name = name
        placed = {"num_cpus": 0, "num_gpus": 0} | dict(options or {})
        environment = placed.pop("environment", {})
        threaded: Any = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)
        actor = threaded(EngineActor).options(name=name, max_restarts=0, **placed)
        self._actor: Any = actor.remote(str(model), config, environment, None if log is None else str(log.absolute()))
        self._started = self._actor.weight_version.remote()
        self._closed = False

    def call(self, method: str, *arguments: Any, timeout: float | None = None) -> Any:
        """The result of a method of the `EngineActor`. Raises what the method raised, `EngineDead` where the actor is
        gone, and Ray's `GetTimeoutError` after `timeout` seconds."""
        return self.wait(self.start(method, *arguments), timeout)

    def start(self, method: str, *arguments: Any, returns: int = 1) -> Any:
        """Begin a call; returns the reference of its result at once, a list of them where it has several."""
        return getattr(self._actor, method).options(num_returns=returns).remote(*arguments)

    @staticmethod
    def wait(reference: ray.ObjectRef, timeout: float | None = None) -> Any:
        """The result behind a reference of `start`; raises as `call` does."""
        try:
            return ray.get(reference, timeout=timeout)
        except ray.exceptions.RayTaskError as error:
            raise_cause(error)
        except ray.exceptions.RayActorError as error:
            raise EngineDead(f"the rollout engine's process is gone: {error}") from error

    @property
    def started(self) -> ray.ObjectRef:
        """Resolves when the engine can generate, or fails as its start-up did."""
        return self._started

    @property
    def ready(self) -> bool:
        """Whether the engine's start-up ended, well or badly."""
        return bool(ray.wait([self._started], timeout=0)[0])

    def wait_until_ready(self) -> None:
        """Block until the engine can generate; raises what its start-up raised."""
        self.wait(self._started, self._config.start_timeout_s)

    @property
    def weight_version(self) -> int:
        return int(self.call("weight_version"))

    def generate(self, requests: Sequence[GenerationRequest], law: SamplingLaw, *, training: bool) -> RolloutBatch:
        """See `RolloutEngine.generate`; the whole batch comes to this process, for rewards and metrics."""
        return self.call("generate", list(requests), law, training)

    def sleep(self) -> None:
        self.call("sleep")

    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        self.call("wake", what)

    def pause(self) -> None:
        self.call("pause")

    def resume(self) -> None:
        self.call("resume")

    def close(self) -> None:
        """Stop the engine's processes and the actor. Idempotent; never raises for an actor that is gone."""
        if self._closed:
            return
        self._closed = True
        if not ray.is_initialized():
            return  # the session is over, and the actor with it; a call would start another Ray
        try:
            # An engine that is still loading cannot answer; killing its worker takes the core with it.
            if self.ready:
                with suppress(ray.exceptions.RayError):  # it is gone already, or will be
                    ray.get(self._actor.close.remote(), timeout=30)
        finally:
            ray.kill(self._actor)

    def kill(self, grace_s: float = 5.0) -> None:
        """End an engine that may be dead, hung or stopped; asks nothing of it but to end its core. Never raises."""
        if self._closed or not ray.is_initialized():
            return
        self._closed = True
        with suppress(ray.exceptions.RayError):
            if self.ready:
                ray.get(self._actor.kill_core.remote(), timeout=grace_s)
        ray.kill(self._actor)
