"""Weights from a sharded trainer into running engines: then the engine's law is transformers' of those weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dppo.rollout.ray_session import RaySession
from tests.distributed import run_ranks
from tests.rollout.conftest import LAW, Served, requests
from tests.rollout.reference import compare_law, load, reference
from tests.rollout.sync_ranks import sync
from tests.tiny import tiny_qwen3_moe

TP2_EP2 = {"tensor": 2, "expert": 2, "sequence_parallel": True}


def compared(served: Served, folder: Path, name: str) -> float:
    """Largest gap of a log-probability to transformers' of the checkpoint in `folder`."""
    batch = served.engine.generate(requests(16, name), LAW, training=True)
    assert (batch.weight_versions == served.version).all()
    return compare_law(batch, reference(load(folder), batch))


@pytest.mark.parametrize("way", ["broadcast", "object_store"])
def test_shards_of_two_ranks_become_the_engines_weights(
    served: Served, ray_session: RaySession, tmp_path: Path, way: str
) -> None:
    """TP2 x EP2: rows, columns, interleaved heads, experts of two ranks, buckets that cut through a layer's experts."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for seed, folder in enumerate(folders):
        tiny_qwen3_moe(folder, seed=20 + seed)
    syncs = [(str(folder), served.next_version(), way) for folder in folders]
    (failed, _) = run_ranks(sync, 2, ray_session.where, [served.engine.name], TP2_EP2, syncs)
    assert failed == {}
    assert compared(served, folders[1], f"{way}-sync") <= 1e-4
