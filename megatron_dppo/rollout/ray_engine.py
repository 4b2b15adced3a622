"""The engine as a Ray actor, and its client for the controller."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import ray
import torch

from megatron_dppo.batch import RolloutBatch
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.errors import EngineDead
from megatron_dppo.rollout.protocol import GenerationRequest, SamplingLaw
from megatron_dppo.rollout.stored import LayerGroups, Part, RolloutHandle, StoredRollout
from megatron_dppo.rollout.weight_transfer.bucket import Bucket, pack


class EngineActor:
    """Runs in a Ray worker: a `VllmEngine` and the rollouts it made that were not released yet."""

    def __init__(self, name: str, model: str, config: RolloutConfig) -> None:
        from megatron_dppo.rollout.vllm_engine import VllmEngine  # vLLM is imported in this process only

        self._name = name
        self._config = config
        self._stored: dict[str, StoredRollout] = {}
        self._engine = VllmEngine(Path(model), config)

    def weight_version(self) -> int:
        return self._engine.weight_version

    def generate(self, requests: list[GenerationRequest], law: SamplingLaw, training: bool) -> RolloutBatch:
        return self._engine.generate(requests, law, training=training)

    def generate_refs(
        self, requests: list[GenerationRequest], law: SamplingLaw, layer_groups: LayerGroups | None
    ) -> RolloutHandle:
        """Sample, write the sequences into the object store once, and return what the controller needs."""
        return self.keep(self._engine.generate(requests, law, training=True), layer_groups)

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

    def objects(self, key: str, parts: list[Part]) -> list[ray.ObjectRef]:
        """References to objects of a rollout; the caller becomes a borrower, and no byte moves yet."""
        if key not in self._stored:
            raise KeyError(f"rollout {key} was released or never made by this engine")
        return [self._stored[key].parts[part] for part in parts]

    def release(self, key: str) -> None:
        self._stored.pop(key, None)

    def begin_update(self, version: int) -> None:
        self._engine.begin_update(version)

    def receive_bucket(self, version: int, bucket: Bucket) -> None:
        with self._engine.update_failure(version):
            self._engine.receive_bucket(version, bucket)

    def init_transfer(self, terms: dict[str, Any]) -> None:
        """See `VllmEngine.init_transfer`, whose arguments `terms` are."""
        self._engine.init_transfer(**terms)

    def receive_shared(self, version: int, number: int) -> None:
        with self._engine.update_failure(version):
            self._engine.receive_shared(version, number)

    def receive_group(self, version: int) -> None:
        with self._engine.update_failure(version):
            self._engine.receive_group(version)

    def end_update(self, version: int, packed: dict[int, int] | None = None) -> list[dict[str, float]]:
        with self._engine.update_failure(version):
            return self._engine.end_update(version, packed)

    def fail_update(self, version: int, reason: str) -> None:
        self._engine.fail_update(version, reason)

    def sleep(self) -> None:
        self._engine.sleep()

    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        self._engine.wake(what)

    def pause(self) -> None:
        self._engine.pause()

    def resume(self) -> None:
        self._engine.resume()

    def close(self) -> None:
        self._engine.close()


class RayRolloutEngine:
    """The controller's engine: a `RolloutEngine` whose work happens in a Ray actor.

    The constructor returns at once, so that the engine loads while the trainer builds its model; the first call waits
    for it, or `wait_until_ready` does. Needs a connected `RaySession`.
    """

    def __init__(
        self,
        model: Path,
        config: RolloutConfig,
        *,
        name: str = "rollout-engine",
        num_gpus: float = 0,
    ) -> None:
        self._config = config
        self.name = name
        actor = ray.remote(EngineActor).options(
            name=name, num_cpus=0, num_gpus=num_gpus, max_concurrency=4, max_restarts=0
        )
        self._actor: Any = actor.remote(name, str(model), config)
        self._started = self._actor.weight_version.remote()
        self._closed = False

    def wait_until_ready(self) -> None:
        """Block until the engine can generate; raises what its start-up raised."""
        self._wait(self._started, self._config.start_timeout_s)

    @property
    def weight_version(self) -> int:
        return int(self._call("weight_version"))

    def generate(self, requests: Sequence[GenerationRequest], law: SamplingLaw, *, training: bool) -> RolloutBatch:
        """See `RolloutEngine.generate`; the whole batch comes to this process, for rewards and metrics."""
        return self._call("generate", list(requests), law, training)

    def generate_refs(
        self, requests: Sequence[GenerationRequest], law: SamplingLaw, layer_groups: LayerGroups | None = None
    ) -> RolloutHandle:
        """Sample every request for training and leave the sequences in the object store, for `RolloutSource` on any
        rank. Release the handle when the step is over, or the store fills up.

        layer_groups: MoE layers whose routes are pulled together, one group per model chunk of the trainer's pipeline
        (`MegatronActor.moe_layer_groups`); None is one group of all.
        """
        return self._call("generate_refs", list(requests), law, layer_groups)

    def keep(self, batch: RolloutBatch, layer_groups: LayerGroups | None = None) -> RolloutHandle:
        """Leave sequences that were put together from several calls of `generate` in the object store; see
        `generate_refs`."""
        return self._call("keep", batch, layer_groups)

    def release(self, handle: RolloutHandle) -> None:
        """Let the store forget a rollout as soon as nobody holds arrays of it."""
        self._call("release", handle.key)

    def update_weights(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See `RolloutEngine.update_weights`. Buckets travel through the object store, one loading while the next is
        gathered: at most two of `rollout.weight_sync_bucket_mib` are alive.

        `named_tensors` may run collectives; it is drained on this thread and stops being drained at the first error.
        """
        timeout = self._config.sync_timeout_s
        self._call("begin_update", version)
        try:
            loading: ray.ObjectRef | None = None
            for bucket in pack(named_tensors, self._config.weight_sync_bucket_mib << 20):
                self._wait(loading, timeout)
                loading = self._actor.receive_bucket.remote(version, ray.put(bucket))
            self._wait(loading, timeout)
            self._call("end_update", version, timeout=timeout)
        except BaseException as error:
            self._give_up(version, f"{type(error).__name__}: {error}")
            raise

    def sleep(self) -> None:
        self._call("sleep")

    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        self._call("wake", what)

    def pause(self) -> None:
        self._call("pause")

    def resume(self) -> None:
        self._call("resume")

    def close(self) -> None:
        """Stop the engine's processes and the actor. Idempotent; never raises for an actor that is gone."""
        if self._closed:
            return
        self._closed = True
        if not ray.is_initialized():
            return  # the session is over, and the actor with it; a call would start another Ray
        try:
            # An engine that is still loading cannot answer; killing its worker takes the core with it.
            if ray.wait([self._started], timeout=0)[0]:
                ray.get(self._actor.close.remote(), timeout=30)
        except ray.exceptions.RayError:
            pass  # it is gone already, or will be
        finally:
            ray.kill(self._actor)

    def start(self, method: str, *arguments: Any) -> ray.ObjectRef:
        """Call a method of the actor; returns at once."""
        return getattr(self._actor, method).remote(*arguments)

    def call(self, method: str, *arguments: Any, timeout: float | None = None) -> Any:
        """Call a method of the actor and wait."""
        return self._call(method, *arguments, timeout=timeout)

    def _give_up(self, version: int, reason: str) -> None:
        try:
            self._call("fail_update", version, reason, timeout=self._config.sync_timeout_s)
        except Exception:
            return  # the gate in the actor is shut since begin_update; the first error is the one to report

    def _call(self, method: str, *arguments: Any, timeout: float | None = None) -> Any:
        return self._wait(getattr(self._actor, method).remote(*arguments), timeout)

    def _wait(self, reference: ray.ObjectRef | None, timeout: float | None) -> Any:
        """The result; the actor's own exception rather than Ray's wrapper of it."""
        if reference is None:
            return None
        try:
            return ray.get(reference, timeout=timeout)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error if isinstance(error.cause, Exception) else None
        except ray.exceptions.ActorDiedError as error:
            raise EngineDead(f"the rollout engine's process is gone: {error}") from error
