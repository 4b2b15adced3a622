"""Rollouts in a real Ray object store, without an engine: what a rank pulls, and what it does not."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import ray

from megatron_dppo.batch import AlignedBatch, Columns, RolloutBatch, align
from megatron_dppo.rollout.fleet.store import RolloutSource, RolloutStore
from megatron_dppo.rollout.ray_session import RaySession
from megatron_dppo.rollout.stored import Part, RolloutHandle, column_names, columns_of
from tests.batch.rollouts import LAYERS, random_batch
from tests.batch.test_align import assert_same

PROMPTS, RESPONSES = [2, 3, 1, 4, 2, 2, 5], [3, 1, 4, 2, 6, 1, 3]


class Keeper(RolloutStore):
    """A store that counts what was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Part] = []

    def objects(self, parts: list[Part]) -> list[ray.ObjectRef]:
        self.asked += parts
        return super().objects(parts)

    def record(self) -> list[Part]:
        asked, self.asked = self.asked, []
        return asked


def keep(batch: RolloutBatch, layer_groups: list[list[int]] | None) -> tuple[Any, RolloutHandle]:
    """Objects of three sequences in a store, as the engines' process and the controller put them there."""
    keeper = ray.remote(Keeper).options(name="keeper", num_cpus=0).remote()
    handles = []
    for number, chosen in enumerate(([0, 1, 2], [3, 4, 5], [6])):
        part, key = batch.select(chosen), f"object {number}"
        handle, columns = columns_of(part, store="keeper", key=key, layer_groups=layer_groups)
        named = zip(column_names(layer_groups), columns, strict=True)
        ray.get(keeper.put.remote(key, {name: ray.put(column) for name, column in named}))
        handles.append(handle)
    return keeper, RolloutHandle.concatenate(handles)


@pytest.mark.parametrize("groups", [None, [[0], [1, 2]], [[2, 0], [1]]])
def test_each_rank_pulls_its_columns_and_layers_only(ray_session: RaySession, groups: list[list[int]] | None) -> None:
    batch = random_batch(5, PROMPTS, RESPONSES, 4)
    expected = align(batch)
    keeper, handle = keep(batch, groups)
    try:
        source = RolloutSource(handle)
        assert_same(source.rows(np.arange(7)), expected)
        ray.get(keeper.record.remote())
        for wanted in (
            Columns(policy=False, topk=False, moe_layers=(1,)),
            Columns(policy=False, topk=False, moe_layers=(2, 1)),
            Columns(topk=False, moe_layers=()),
            Columns(moe_layers=(0,)),
        ):
            source = RolloutSource(handle)
            chosen = np.array([5, 3])  # both in the second object
            got, right = source.rows(chosen, wanted), expected.select(chosen, wanted)
            for name in ("policy", "topk", "routes"):
                assert (getattr(got, name) is None) == (getattr(right, name) is None)
            np.testing.assert_array_equal(got.input_ids, right.input_ids)
            if right.routes is not None and got.routes is not None:
                np.testing.assert_array_equal(got.routes.experts, right.routes.experts)
            asked: list[Part] = ray.get(keeper.record.remote())
            assert {key for key, _ in asked} == {"object 1"}
            names = {name for _, name in asked}
            assert ("policy" in names, "topk" in names) == (wanted.policy, wanted.topk)
            layers = {
                layer for name in names if name.startswith("routes") for layer in handle.layer_groups[int(name[7:])]
            }
            if groups == [[0], [1, 2]] and wanted.moe_layers == (1,):
                assert layers == {1, 2}
            if wanted.moe_layers == ():
                assert not layers
            before = source.pulled_bytes
            assert before > 0
            source.rows(chosen, wanted)
            assert source.pulled_bytes == before, "what is here already does not travel again"
            ray.get(keeper.record.remote())
        empty = source.rows(np.zeros(0, dtype=np.int64), Columns(moe_layers=tuple(range(LAYERS))))
        assert_same_kind(empty, expected)
    finally:
        ray.kill(keeper)


@pytest.mark.parametrize("groups", [None, [[2, 0], [1]]])
@pytest.mark.parametrize("wanted", [[6, 0, 4, 1], [3, 6, 3], [0, 2, 5, 6], [6, 5, 4, 3, 2, 1, 0]])
def test_a_pack_from_several_objects_comes_in_the_order_asked(
    ray_session: RaySession, groups: list[list[int]] | None, wanted: list[int]
) -> None:
    batch = random_batch(5, PROMPTS, RESPONSES, 4)
    assert batch.routes is not None
    routes = batch.routes.routed_under(np.repeat([7, 8, 7, 7, 9, 8, 8], batch.lengths))
    batch = replace(batch, routes=routes)
    keeper, handle = keep(batch, groups)
    try:
        assert_same(RolloutSource(handle).rows(np.array(wanted)), align(batch).select(np.array(wanted)))
    finally:
        ray.kill(keeper)


@pytest.mark.parametrize("groups", [None, [[0], [1, 2]]])
def test_a_pack_copies_its_own_rows_and_not_the_objects_that_hold_them(
    ray_session: RaySession, groups: list[list[int]] | None
) -> None:
    batch = random_batch(5, PROMPTS, [3, 30_000, 4, 2, 30_000, 1, 3], 4)
    keeper, handle = keep(batch, groups)
    try:
        source, pack = RolloutSource(handle), np.array([0, 3])
        expected = source.rows(pack)
        tracemalloc.start()
        got = source.rows(pack)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        ray.kill(keeper)
    assert_same(got, expected)
    assert handle.topk_bytes[:2].min() > 1 << 20
    assert most < 3 << 19, "Ray's packer takes a MiB, and 11 rows next to nothing"


def assert_same_kind(empty: AlignedBatch, full: AlignedBatch) -> None:
    assert len(empty) == 0
    assert empty.topk is not None
    assert full.topk is not None
    assert empty.topk.ids.shape == (0, full.topk.ids.shape[1])
    assert empty.routes is not None
    assert empty.routes.moe_layers == LAYERS


def test_groups_that_are_not_the_recorded_layers_are_refused() -> None:
    batch = random_batch(5, PROMPTS, RESPONSES, 4)
    with pytest.raises(ValueError, match=r"3 MoE layers.*different models"):
        columns_of(batch, store="a", key="k", layer_groups=[[0], [1], [2], [3]])
