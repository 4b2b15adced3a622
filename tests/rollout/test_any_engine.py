"""A fleet knows its engines by the contract alone: here one of somebody's own, found by its path."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_dppo.checkpoint.weight_layout import pack
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.engine import (
    EngineClosed,
    EngineDead,
    GenerationRequest,
    RolloutEngine,
    SamplingConfig,
    update_weights,
)
from megatron_dppo.rollout.fleet.fleet import EngineFleet
from megatron_dppo.rollout.ray_session import RaySession
from megatron_dppo.rollout.start import open_engine, open_rollout
from megatron_dppo.rollout.weight_transfer.manifest import IncompleteSync
from megatron_dppo.rollout.weight_transfer.recipients import Recipients
from tests.rollout.uniform_engine import TENSORS

CONFIG = RolloutConfig(
    engine="tests.rollout.uniform_engine:make",
    engines=2,
    max_prompt_tokens=8,
    max_response_tokens=4,
    sequences_per_object=3,
    top_k_logprobs=0,
)
SAMPLING = SamplingConfig(max_tokens=4)
ROOT = Path(__file__).resolve().parents[2]


def make() -> RolloutEngine:
    return open_engine(Path(), CONFIG, str(ROOT))


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
    to.wait(to.ask(lambda engine: engine.end_update(version, {})))
    fleet.synced(version, members, to.errors)
    assert not to.errors


def test_a_fleet_of_another_engine_samples_syncs_and_replaces(ray_session: RaySession) -> None:
    fleet = EngineFleet(partial(open_engine, Path(), CONFIG, str(ROOT)), CONFIG, name="uniform")
    try:
        assert len(fleet.ready_members()) == 2
        here = make().generate(asked("first"), SAMPLING, training=True)
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
            first.ask(lambda engine: os._exit(1), "control").result(300)
        again = fleet.generate(asked("again", 40), SAMPLING, training=True)
        assert again.request_ids == tuple(request.request_id for request in asked("again", 40))
        assert (again.weight_versions == 3).all()
    finally:
        fleet.close()


def test_an_update_in_this_process_that_lacks_a_tensor_is_abandoned() -> None:
    engine = make()
    with pytest.raises(IncompleteSync, match="1 tensors did not come, first b"):
        update_weights(engine, 1, tensors()[:1], bucket_mib=1)
    with pytest.raises(EngineClosed, match=r"the sync to weight version 1 died \(IncompleteSync: 1 tensors"):
        engine.generate(asked("shut"), SAMPLING, training=True)
    update_weights(engine, 2, tensors(), bucket_mib=1)
    assert (engine.generate(asked("open"), SAMPLING, training=True).weight_versions == 2).all()
