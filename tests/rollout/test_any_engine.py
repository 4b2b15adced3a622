"""A fleet knows its engines by the contract alone: here one that is not vLLM's, written in a page."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

import numpy as np
import pytest
import torch

from megatron_dppo.batch import RolloutBatch
from megatron_dppo.rollout.bucket import Bucket, pack
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.engine import (
    EngineClosed,
    EngineDead,
    GenerationRequest,
    Health,
    RolloutEngine,
    SamplingConfig,
    TransferTerms,
    WorkerReport,
    check_requests,
    update_weights,
)
from megatron_dppo.rollout.fleet.fleet import EngineFleet
from megatron_dppo.rollout.ray_session import RaySession
from megatron_dppo.rollout.start import open_rollout
from megatron_dppo.rollout.weight_transfer.manifest import IncompleteSync, Manifest
from megatron_dppo.rollout.weight_transfer.recipients import Recipients

CONFIG = RolloutConfig(engines=2, max_prompt_tokens=8, max_response_tokens=4, sequences_per_object=3, top_k_logprobs=0)
SAMPLING = SamplingConfig(max_tokens=4)
TENSORS = {"a": (3, 2), "b": (4,)}
VOCAB = 50


class UniformEngine:
    """Draws every token uniformly, from the request's seed."""

    def __init__(self, config: RolloutConfig) -> None:
        self._config, self._manifest = config, Manifest(TENSORS)
        self.weight_version, self._refused = 0, ""
        self._paused = threading.Event()
        self._paused.set()

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingConfig, *, training: bool, call: str = ""
    ) -> RolloutBatch:
        if self._refused:
            raise EngineClosed(f"the engine refuses to generate: {self._refused}")
        check_requests(requests, sampling, self._config)
        self._paused.wait()
        return RolloutBatch.concatenate([self._answer(request, sampling.max_tokens) for request in requests])

    def _answer(self, request: GenerationRequest, count: int) -> RolloutBatch:
        prompt = len(request.prompt_ids)
        sampled = np.arange(prompt + count) >= prompt
        answer = np.random.default_rng(request.seed).integers(0, VOCAB, count)
        return RolloutBatch(
            token_ids=np.concatenate([request.prompt_ids, answer]).astype(np.int32),
            offsets=np.array([0, prompt + count]),
            prompt_lengths=np.array([prompt], dtype=np.int32),
            loss_mask=sampled,
            mu_logp=np.where(sampled, -np.log(VOCAB), 0.0).astype(np.float32),
            topk_ids=np.zeros((prompt + count, 0), dtype=np.int32),
            topk_logp=np.zeros((prompt + count, 0), dtype=np.float32),
            routes=None,
            request_ids=(request.request_id,),
            finish_reasons=("length",),
            weight_versions=np.full(prompt + count, self.weight_version, dtype=np.int32),
        )

    def abandon(self, call: str) -> None: ...

    def alive(self) -> Health:
        return Health({})

    def agree(self, terms: TransferTerms) -> None: ...

    def begin_update(self, version: int) -> None:
        self._refused = f"the sync to weight version {version} has not finished"
        self._manifest.begin()

    def receive_bucket(self, version: int, bucket: Bucket) -> None:
        for slot in bucket.slots:
            self._manifest.check(slot.name, slot.shape)

    def receive_shared(self, version: int, number: int) -> None:
        raise NotImplementedError

    def receive_group(self, version: int) -> None:
        raise NotImplementedError

    def end_update(self, version: int, checksums: Mapping[int, int] | None = None) -> list[WorkerReport]:
        self._manifest.end()
        self.weight_version, self._refused = version, ""
        return [WorkerReport(load_s=0.0, finish_s=0.0)]

    def abandon_update(self, version: int, reason: str) -> None:
        self._refused = f"the sync to weight version {version} died ({reason})"

    def sleep(self) -> None: ...

    def wake(self, what: Literal["weights", "kv_cache"]) -> None: ...

    def pause(self) -> None:
        self._paused.clear()

    def resume(self) -> None:
        self._paused.set()

    def close(self) -> None: ...


def make(config: RolloutConfig) -> RolloutEngine:
    return UniformEngine(config)


def asked(name: str, count: int = 10) -> list[GenerationRequest]:
    return [
        GenerationRequest(request_id=f"{name}/{i}/0", prompt_ids=np.arange(1, 3 + i % 5, dtype=np.int32), seed=i)
        for i in range(count)
    ]


def tensors() -> list[tuple[str, torch.Tensor]]:
    return [(name, torch.zeros(shape)) for name, shape in TENSORS.items()]


def sync(fleet: EngineFleet, version: int) -> None:
    """As the trainer does: every call to all engines at once."""
    members = fleet.members_to_sync(version)
    to = Recipients(members, timeout_s=60)
    to.wait(to.ask(lambda engine: engine.begin_update(version)))
    for bucket in pack(tensors(), 1 << 10):
        to.wait(to.ask(lambda engine: engine.receive_bucket(version, bucket)))  # noqa: B023
    to.wait(to.ask(lambda engine: engine.end_update(version)))
    fleet.synced(version, members, to.errors)
    assert not to.errors


def test_a_fleet_of_another_engine_samples_syncs_and_replaces(ray_session: RaySession) -> None:
    fleet = EngineFleet(partial(make, CONFIG), CONFIG, name="uniform")
    try:
        assert len(fleet.ready_members()) == 2
        here = make(CONFIG).generate(asked("first"), SAMPLING, training=True)
        there = fleet.generate(asked("first"), SAMPLING, training=True)
        np.testing.assert_array_equal(there.token_ids, here.token_ids)
        assert there.request_ids == here.request_ids
        sync(fleet, 3)
        handle = fleet.generate_stored(asked("stored"), SAMPLING)
        assert handle.versions.tolist() == [[3, 3]] * 10
        for mine, row in zip(open_rollout(handle).token_ids(), range(10), strict=True):
            np.testing.assert_array_equal(mine, here.token_ids[here.offsets[row] : here.offsets[row + 1]])
        fleet.release(handle)

        first = fleet.members[0]
        with pytest.raises(EngineDead, match="process is gone"):
            first.ask(lambda engine: os._exit(1), "control").result(60)
        again = fleet.generate(asked("again", 40), SAMPLING, training=True)
        assert again.request_ids == tuple(request.request_id for request in asked("again", 40))
        assert (again.weight_versions == 3).all()
    finally:
        fleet.close()


def test_an_update_in_this_process_that_lacks_a_tensor_is_abandoned() -> None:
    engine = make(CONFIG)
    with pytest.raises(IncompleteSync, match="1 tensors did not come, first b"):
        update_weights(engine, 1, tensors()[:1], bucket_mib=1)
    with pytest.raises(EngineClosed, match=r"the sync to weight version 1 died \(IncompleteSync: 1 tensors"):
        engine.generate(asked("shut"), SAMPLING, training=True)
    update_weights(engine, 2, tensors(), bucket_mib=1)
    assert (engine.generate(asked("open"), SAMPLING, training=True).weight_versions == 2).all()
