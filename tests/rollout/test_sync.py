"""Weights from a sharded trainer into running engines: then it gives transformers' log-probabilities for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.rollout.fleet.host import RemoteEngine
from megatron_dppo.rollout.ray_session import RaySession
from tests.distributed import run_ranks
from tests.rollout.conftest import CONFIG, SAMPLING, Asked, Served, making, requests
from tests.rollout.reference import compare_law, compare_routes, load, reference
from tests.rollout.sync_ranks import sync
from tests.tiny import tiny_qwen3_moe

TP2_EP2 = {"tensor": 2, "expert": 2, "sequence_parallel": True}


def compared(served: Served, folder: Path, name: str) -> float:
    """Largest gap of a log-probability to transformers' of the checkpoint in `folder`, whose experts it chose."""
    batch = served.engine.generate(requests(16, name), SAMPLING, training=True)
    assert (batch.weight_versions == served.version).all()
    expected = reference(load(folder), batch)
    assert compare_routes(batch, expected)[1] == 0
    return compare_law(batch, expected)


@pytest.mark.parametrize("way", ["broadcast", "object_store"])
def test_shards_of_two_ranks_become_the_engines_weights(
    served: Served, ray_session: RaySession, tmp_path: Path, way: str
) -> None:
    """TP2 x EP2: rows, columns, interleaved heads, experts of two ranks, buckets that cut through a layer's experts."""
    assert isinstance(served.engine, Asked)
    folders = [tmp_path / "one", tmp_path / "two"]
    for seed, folder in enumerate(folders):
        tiny_qwen3_moe(folder, seed=20 + seed)
    syncs = [(str(folder), served.next_version(), way) for folder in folders]
    (failed, _) = run_ranks(sync, 2, ray_session.where, [served.engine.client.name], TP2_EP2, syncs)
    assert failed == {}
    assert compared(served, folders[1], f"{way}-sync") <= 1e-4


MIXED: dict[str, Any] = {
    "mlp_only_layers": [0, 2],
    "tie_word_embeddings": True,
    "norm_topk_prob": False,
    "num_hidden_layers": 5,
    "moe_intermediate_size": 64,  # vLLM's kernel of some processors asks for 64 rows of gate and up on each worker
}


@pytest.mark.full
@pytest.mark.parametrize(("workers", "divided"), [(1, False), (2, False), (2, True)], ids=["TP1", "TP2", "TP2, EP2"])
def test_a_mixed_tied_model_from_every_layout_to_engines_of_one_and_two_workers(
    ray_session: RaySession, tmp_path: Path, workers: int, divided: bool
) -> None:
    """Dense and expert layers, one matrix for embedding and head; TP2 x EP2 and two pipeline stages."""
    start = tmp_path / "start"
    tiny_qwen3_moe(start, seed=40, **MIXED)
    config = CONFIG.model_copy(update={"tensor_parallel": workers, "expert_parallel": divided})
    engine = RemoteEngine(making(start, config), name=f"mixed-{workers}-{divided}")
    try:
        asked = Asked(engine)
        served = Served(asked, start, asked.generate(requests(4, "first"), SAMPLING, training=True))
        assert compared(served, start, "loaded") <= 1e-4
        asked.begin_update(1)
        assert "no communicator" in str(engine.ask(lambda one: one.receive_group(1), "weights").exception(300))
        asked.begin_update(2)  # where what the other worker said then would be an answer to this
        asked.abandon_update(2, "given up")
        layouts: list[tuple[str, dict[str, Any]]] = [
            ("broadcast", TP2_EP2),
            ("object_store", {"pipeline": 2}),
            ("broadcast", {"pipeline": 2}),
        ]
        for number, (way, layout) in enumerate(layouts):
            folder = tmp_path / str(number)
            tiny_qwen3_moe(folder, seed=41 + number, **MIXED)
            syncs = [(str(folder), served.next_version(), way)]
            sizes = (workers, 100_000, workers, not divided)
            (failed, _) = run_ranks(sync, 2, ray_session.where, [engine.name], layout, syncs, *sizes)
            assert failed == {}
            gap = compared(served, folder, f"mixed-{number}")
            print(f"{layout} by {way} to {workers} workers, experts divided {divided}: worst gap {gap:.2e} nats")
            assert gap <= 1e-4
    finally:
        engine.close()
