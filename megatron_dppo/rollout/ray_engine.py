"""The engine as a Ray actor, its client for the controller, and what every rank uses to pull rollouts."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import ray
import torch

from megatron_dppo.batch import RolloutBatch
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.errors import EngineDead
from megatron_dppo.rollout.protocol import GenerationRequest, SamplingLaw
from megatron_dppo.rollout.weight_transfer.bucket import Bucket, pack


@dataclass(frozen=True)
class RolloutHandle:
    """A rollout in the object store: everything about it but its tokens. Plain data, to be broadcast to the ranks.

    `bounds[c]:bounds[c + 1]` are the sequences of object `c`.
    """

    actor: str
    key: str
    bounds: np.ndarray
    lengths: np.ndarray
    """int64 `[B]`, tokens of each sequence, prompt included."""
    prompt_lengths: np.ndarray
    """int32 `[B]`"""
    request_ids: tuple[str, ...] = field(repr=False)
    finish_reasons: tuple[str, ...] = field(repr=False)
    weight_version: int
    sampled: np.ndarray
    """int64 `[B]`, tokens of each sequence that the policy sampled."""
    routed: np.ndarray
    """int64 `[B]`, tokens of each sequence whose experts were recorded."""
    route_bytes: int
    """Size of all routes; 0 when none were recorded."""

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.request_ids)


class EngineActor:
    """Runs in a Ray worker: a `VllmEngine` and the rollouts it made that were not released yet."""

    def __init__(self, name: str, model: str, config: RolloutConfig) -> None:
        from megatron_dppo.rollout.vllm_engine import VllmEngine  # vLLM is imported in this process only

        self._name = name
        self._config = config
        self._objects: dict[str, list[ray.ObjectRef]] = {}
        self._engine = VllmEngine(Path(model), config)

    def weight_version(self) -> int:
        return self._engine.weight_version

    def generate(self, requests: list[GenerationRequest], law: SamplingLaw, training: bool) -> RolloutHandle:
        """Sample, write the sequences into the object store once, and return what the controller needs."""
        return self.keep(self._engine.generate(requests, law, training=training))

    def keep(self, batch: RolloutBatch) -> RolloutHandle:
        """Write sequences into the object store once, and return what the controller needs."""
        size = self._config.sequences_per_object
        bounds = np.append(np.arange(0, len(batch), size), len(batch))
        key = uuid.uuid4().hex
        chunks = [batch.select(np.arange(a, b)) for a, b in pairwise(bounds)]
        self._objects[key] = [ray.put(chunk) for chunk in chunks]
        return RolloutHandle(
            actor=self._name,
            key=key,
            bounds=bounds,
            lengths=batch.lengths,
            prompt_lengths=batch.prompt_lengths,
            request_ids=batch.request_ids,
            finish_reasons=batch.finish_reasons,
            weight_version=self._engine.weight_version,
            sampled=batch.sampled_per_sequence,
            routed=batch.routed_per_sequence,
            route_bytes=0 if batch.routes is None else batch.routes.nbytes,
        )

    def objects(self, key: str, numbers: list[int]) -> list[ray.ObjectRef]:
        """References to objects of a rollout; the caller becomes a borrower, and no byte moves yet."""
        if key not in self._objects:
            raise KeyError(f"rollout {key} was released or never made by this engine")
        return [self._objects[key][i] for i in numbers]

    def release(self, key: str) -> None:
        self._objects.pop(key, None)

    def begin_update(self, version: int) -> None:
        self._engine.begin_update(version)

    def receive_bucket(self, version: int, bucket: Bucket) -> None:
        with self._engine.update_failure(version):
            self._engine.receive_bucket(version, bucket)

    def end_update(self, version: int) -> None:
        with self._engine.update_failure(version):
            self._engine.end_update(version)

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
        self, model: Path, config: RolloutConfig, *, name: str = "rollout-engine", num_gpus: float = 0
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
        handle = self.generate_refs(requests, law, training=training)
        batch = fetch(handle)
        self.release(handle)
        return batch

    def generate_refs(
        self, requests: Sequence[GenerationRequest], law: SamplingLaw, *, training: bool
    ) -> RolloutHandle:
        """Sample every request and leave the sequences in the object store, for `fetch` on any rank.

        Release the handle when the step is over, or the store fills up.
        """
        return self._call("generate", list(requests), law, training)

    def keep(self, batch: RolloutBatch) -> RolloutHandle:
        """Leave sequences that were put together from several calls of `generate` in the object store, for `fetch` on
        any rank. Release the handle as that of `generate_refs`."""
        return self._call("keep", batch)

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
        try:
            # An engine that is still loading cannot answer; killing its worker takes the core with it.
            if ray.wait([self._started], timeout=0)[0]:
                ray.get(self._actor.close.remote(), timeout=30)
        except ray.exceptions.RayError:
            pass  # it is gone already, or will be
        finally:
            ray.kill(self._actor)

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


def fetch(handle: RolloutHandle, sequences: np.ndarray | Sequence[int] | None = None) -> RolloutBatch:
    """The named sequences of a rollout, in the order named (all when None), on any rank with a `RaySession`.

    Pulls only the objects that hold them. Arrays are read-only views of the object store where one object is asked for
    whole and in order; otherwise rows are copied.
    """
    wanted = np.arange(len(handle)) if sequences is None else np.asarray(sequences, dtype=np.int64)
    if len(wanted) and (wanted.min() < 0 or wanted.max() >= len(handle)):
        raise IndexError(f"sequences {wanted.min()}..{wanted.max()} of a rollout of {len(handle)}")
    owners = np.searchsorted(handle.bounds, wanted, side="right") - 1
    numbers = np.unique(owners)
    actor: Any = ray.get_actor(handle.actor)
    chunks: list[RolloutBatch] = ray.get(ray.get(actor.objects.remote(handle.key, numbers.tolist())))
    firsts = handle.bounds[numbers]
    sizes = handle.bounds[numbers + 1] - firsts
    joined = chunks[0] if len(chunks) == 1 else RolloutBatch.concatenate(chunks)
    before = np.concatenate([[0], np.cumsum(sizes)])
    places = before[np.searchsorted(numbers, owners)] + wanted - handle.bounds[owners]
    if np.array_equal(places, np.arange(len(joined))):
        return joined
    return joined.select(places)
