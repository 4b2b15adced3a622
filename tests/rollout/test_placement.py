"""Which GPUs an engine gets, without any GPU."""

from __future__ import annotations

import pytest

from megatron_dppo.errors import UserError
from megatron_dppo.rollout.fleet.placement import EnginePlace, Places, RankPlace, colocated, fleet
from megatron_dppo.rollout.ray_session import RaySession
from megatron_dppo.rollout.weight_transfer.cuda_ipc import check_allocator


def ranks(nodes: int, gpus: int, used: int) -> list[RankPlace]:
    """`used` ranks on each of `nodes` nodes of `gpus` GPUs."""
    return [
        RankPlace(f"node{n}", f"{n}.{i}", tuple(f"{n}.{c}" for c in range(gpus)))
        for n in range(nodes)
        for i in range(used)
    ]


def test_colocated_engines_get_the_gpus_of_their_ranks() -> None:
    places = colocated(ranks(2, 4, 4), workers=2)
    assert [(p.node, p.uuids) for p in places] == [
        ("node0", ("0.0", "0.1")),
        ("node0", ("0.2", "0.3")),
        ("node1", ("1.0", "1.1")),
        ("node1", ("1.2", "1.3")),
    ]
    assert places[1].environment == {"CUDA_VISIBLE_DEVICES": "GPU-0.2,GPU-0.3"}


def test_a_colocated_engine_fits_on_one_node() -> None:
    with pytest.raises(UserError, match="ranks 2 to 3 are on several nodes"):
        colocated(ranks(2, 3, 3), workers=2)
    with pytest.raises(UserError, match="3 ranks are not a multiple of"):
        colocated(ranks(1, 3, 3), workers=2)


def test_a_fleet_on_one_node_gets_what_the_ranks_leave() -> None:
    places = fleet(ranks(1, 4, 2), engines=2, workers=1, nodes={})
    assert [p.uuids for p in places] == [("0.2",), ("0.3",)]
    assert [p.uuids for p in fleet(ranks(1, 4, 2), engines=1, workers=2, nodes={})] == [("0.2", "0.3")]
    with pytest.raises(UserError, match=r"3 engines of 1 GPUs are wanted; .* there is room for 2"):
        fleet(ranks(1, 4, 2), engines=3, workers=1, nodes={})


def test_other_nodes_of_a_cluster_are_handed_out_by_ray() -> None:
    nodes = {"node0": 0, "a": 4, "b": 3}
    places = fleet(ranks(1, 2, 2), engines=3, workers=2, nodes=nodes)
    assert places == [EnginePlace(gpus=2)] * 3
    with pytest.raises(UserError, match="there is room for 3"):
        fleet(ranks(1, 2, 2), engines=4, workers=2, nodes=nodes)
    with pytest.raises(UserError, match="start Ray on the trainer's nodes with --num-gpus 0"):
        fleet(ranks(1, 2, 2), engines=3, workers=2, nodes=nodes | {"node0": 2})


def test_on_a_cpu_ray_chooses() -> None:
    cpu = [RankPlace("node0", None, ())] * 2
    assert fleet(cpu, engines=2, workers=1, nodes={}) == [EnginePlace()] * 2
    assert [p.environment for p in colocated(cpu, workers=1)] == [{}, {}]


def test_expandable_segments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_allocator()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments: True")
    with pytest.raises(UserError, match="expandable segments"):
        check_allocator()


def test_engines_do_not_wait_for_ever_for_gpus_that_others_have(ray_session: RaySession) -> None:
    with pytest.raises(UserError, match=r"2 of 3 engines got no GPUs of the Ray cluster within .*=1; others use them"):
        Places([EnginePlace(), EnginePlace(gpus=1), EnginePlace(gpus=1)], timeout_s=1.0)
