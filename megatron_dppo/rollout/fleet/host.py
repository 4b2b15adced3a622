"""The engine inside its Ray actor."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import psutil
import ray

from megatron_dppo.batch import RolloutBatch
from megatron_dppo.launch.imports import uncollected
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.engine import EngineDead, GenerationRequest, SamplingLaw
from megatron_dppo.rollout.stored import LayerGroups, columns_of
from megatron_dppo.rollout.weight_transfer.bucket import Bucket

WORK, WEIGHTS, CONTROL = "work", "weights", "control"
CONCURRENCY_GROUPS = {WORK: 64, WEIGHTS: 1, CONTROL: 8}
"""Threads of each kind of call. Generation may take all of its own; calls that bring weights run one after the other in
the order in which they were made; what asks, pauses or aborts never waits behind either."""


class EngineActor:
    """Runs in a Ray worker: a `VllmEngine`. Nothing that it made is lost with it."""

    def __init__(self, model: str, config: RolloutConfig, environment: Mapping[str, str], log: str | None) -> None:
        os.environ.update(environment)  # before anything looks for devices
        kept = log is not None and _print_to(log)
        with uncollected():
            from megatron_dppo.rollout.vllm.engine import VllmEngine  # vLLM is imported in this process only

        try:
            self._engine = VllmEngine(Path(model), config)
        except RuntimeError as error:
            # vLLM says of a core that failed no more than that it did; the reason is what the core printed.
            where = f"what it printed is in {log}" if kept else "what it printed is in the logs of Ray's workers there"
            raise EngineDead(f"the engine did not start on {socket.gethostname()} ({error}); {where}") from error

    @ray.method(concurrency_group=CONTROL)
    def weight_version(self) -> int:
        return self._engine.weight_version

    @ray.method(concurrency_group=WORK)
    def generate(
        self, requests: list[GenerationRequest], law: SamplingLaw, training: bool, call: str = ""
    ) -> RolloutBatch:
        return self._engine.generate(requests, law, training=training, call=call)

    @ray.method(concurrency_group=WORK)
    def generate_columns(
        self,
        requests: list[GenerationRequest],
        law: SamplingLaw,
        store: str,
        key: str,
        layer_groups: LayerGroups | None,
    ) -> tuple[Any, ...]:
        """Sample for training; returns the handle and the columns of `columns_of`, each as an object of its own. They
        belong to the caller and outlive this process."""
        batch = self._engine.generate(requests, law, training=True, call=key)
        handle, columns = columns_of(batch, store=store, key=key, layer_groups=layer_groups)
        return handle, *columns

    @ray.method(concurrency_group=CONTROL)
    def abandon(self, call: str) -> None:
        self._engine.abandon(call)

    @ray.method(concurrency_group=CONTROL)
    def alive(self) -> dict[str, int]:
        """See `VllmEngine.alive`."""
        return self._engine.alive()

    @ray.method(concurrency_group=CONTROL)
    def processes(self) -> list[int]:
        """Process ids: this one's, then those of the core and its workers."""
        own = psutil.Process()
        return [own.pid, *(child.pid for child in own.children(recursive=True))]

    @ray.method(concurrency_group=CONTROL)
    def kill_core(self) -> None:
        """End every process below this one, also one that is stopped and would not notice that its parent ended."""
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()

    @ray.method(concurrency_group=WEIGHTS)
    def begin_update(self, version: int) -> None:
        self._engine.weights.begin(version)

    @ray.method(concurrency_group=WEIGHTS)
    def receive_bucket(self, version: int, bucket: Bucket) -> None:
        with self._engine.weights.failure(version):
            self._engine.weights.receive_bucket(version, bucket)

    @ray.method(concurrency_group=WEIGHTS)
    def init_transfer(self, terms: dict[str, Any]) -> None:
        """See `WeightUpdates.init_transfer`, whose arguments `terms` are."""
        self._engine.weights.init_transfer(**terms)

    @ray.method(concurrency_group=WEIGHTS)
    def receive_shared(self, version: int, number: int) -> None:
        with self._engine.weights.failure(version):
            self._engine.weights.receive_shared(version, number)

    @ray.method(concurrency_group=WEIGHTS)
    def receive_group(self, version: int) -> None:
        with self._engine.weights.failure(version):
            self._engine.weights.receive_group(version)

    @ray.method(concurrency_group=WEIGHTS)
    def end_update(self, version: int, packed: dict[int, int] | None = None) -> list[dict[str, float]]:
        with self._engine.weights.failure(version):
            return self._engine.weights.end(version, packed)

    @ray.method(concurrency_group=CONTROL)
    def fail_update(self, version: int, reason: str) -> None:
        self._engine.weights.fail(version, reason)

    @ray.method(concurrency_group=WEIGHTS)
    def sleep(self) -> None:
        self._engine.sleep()

    @ray.method(concurrency_group=WEIGHTS)
    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        self._engine.wake(what)

    @ray.method(concurrency_group=CONTROL)
    def pause(self) -> None:
        self._engine.pause()

    @ray.method(concurrency_group=CONTROL)
    def resume(self) -> None:
        self._engine.resume()

    @ray.method(concurrency_group=WEIGHTS)
    def close(self) -> None:
        self._engine.close()


def _print_to(log: str) -> bool:
    """Let this process and those it starts print to a file, which outlives Ray's own ones. False where it cannot be
    written: a node of engines alone may not have the run's folder."""
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        return False
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    return True
