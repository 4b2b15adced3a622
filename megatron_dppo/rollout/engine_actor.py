"""The engine inside its Ray actor."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any, Literal

import ray

from megatron_dppo.batch import RolloutBatch
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.protocol import GenerationRequest, SamplingLaw
from megatron_dppo.rollout.stored import LayerGroups, Part, RolloutHandle, StoredRollout
from megatron_dppo.rollout.weight_transfer.bucket import Bucket

WORK, WEIGHTS, CONTROL = "work", "weights", "control"
CONCURRENCY_GROUPS = {WORK: 64, WEIGHTS: 1, CONTROL: 8}
"""Threads of each kind of call. Generation may take all of its own; calls that bring weights run one after the other in
the order in which they were made; what asks, pauses or aborts never waits behind either."""


class EngineActor:
    """Runs in a Ray worker: a `VllmEngine` and the rollouts it made that were not released yet."""

    def __init__(self, name: str, model: str, config: RolloutConfig) -> None:
        from megatron_dppo.rollout.vllm_engine import VllmEngine  # vLLM is imported in this process only

        self._name = name
        self._config = config
        self._stored: dict[str, StoredRollout] = {}
        self._engine = VllmEngine(Path(model), config)

    @ray.method(concurrency_group=CONTROL)
    def weight_version(self) -> int:
        return self._engine.weight_version

    @ray.method(concurrency_group=WORK)
    def generate(self, requests: list[GenerationRequest], law: SamplingLaw, training: bool) -> RolloutBatch:
        return self._engine.generate(requests, law, training=training)

    @ray.method(concurrency_group=WORK)
    def generate_refs(
        self, requests: list[GenerationRequest], law: SamplingLaw, layer_groups: LayerGroups | None
    ) -> RolloutHandle:
        """Sample, write the sequences into the object store once, and return what the controller needs."""
        return self.keep(self._engine.generate(requests, law, training=True), layer_groups)

    @ray.method(concurrency_group=WORK)
    def keep(self, batch: RolloutBatch, layer_groups: LayerGroups | None) -> RolloutHandle:
        """Write sequences into the object store once, and return what the controller needs."""
        stored, handle = StoredRollout.put(
            batch,
            actor=self._name,
            key=uuid.uuid4().hex,
            weight_version=self._engine.weight_version,
            sequences_per_object=self._config.sequences_per_object,
            layer_groups=layer_groups,
        )
        self._stored[handle.key] = stored
        return handle

    @ray.method(concurrency_group=CONTROL)
    def objects(self, key: str, parts: list[Part]) -> list[ray.ObjectRef]:
        """References to objects of a rollout; the caller becomes a borrower, and no byte moves yet."""
        if key not in self._stored:
            raise KeyError(f"rollout {key} was released or never made by this engine")
        return [self._stored[key].parts[part] for part in parts]

    @ray.method(concurrency_group=CONTROL)
    def release(self, key: str) -> None:
        self._stored.pop(key, None)

    @ray.method(concurrency_group=WEIGHTS)
    def begin_update(self, version: int) -> None:
        self._engine.begin_update(version)

    @ray.method(concurrency_group=WEIGHTS)
    def receive_bucket(self, version: int, bucket: Bucket) -> None:
        with self._engine.update_failure(version):
            self._engine.receive_bucket(version, bucket)

    @ray.method(concurrency_group=WEIGHTS)
    def init_transfer(self, terms: dict[str, Any]) -> None:
        """See `VllmEngine.init_transfer`, whose arguments `terms` are."""
        self._engine.init_transfer(**terms)

    @ray.method(concurrency_group=WEIGHTS)
    def receive_shared(self, version: int, number: int) -> None:
        with self._engine.update_failure(version):
            self._engine.receive_shared(version, number)

    @ray.method(concurrency_group=WEIGHTS)
    def receive_group(self, version: int) -> None:
        with self._engine.update_failure(version):
            self._engine.receive_group(version)

    @ray.method(concurrency_group=WEIGHTS)
    def end_update(self, version: int, packed: dict[int, int] | None = None) -> list[dict[str, float]]:
        with self._engine.update_failure(version):
            return self._engine.end_update(version, packed)

    @ray.method(concurrency_group=CONTROL)
    def fail_update(self, version: int, reason: str) -> None:
        self._engine.fail_update(version, reason)

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
