"""Engines of the other families, against transformers and the trainer, before and after a sync from sharded ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dppo.rollout.fleet.host import RemoteEngine
from megatron_dppo.rollout.ray_session import RaySession
from tests.actor.matrix import FAMILIES
from tests.distributed import run_ranks
from tests.rollout.conftest import CONFIG, KINDS, SAMPLING, Asked, making, requests
from tests.rollout.reference import load
from tests.rollout.sync_ranks import sync
from tests.rollout.test_parity import check
from tests.rollout.test_routes_parity import parity_on_rank
from tests.tiny import tiny_model

TP2_EP2 = {"tensor": 2, "expert": 2, "sequence_parallel": True}


@pytest.mark.parametrize("engine_kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_of_the_family(ray_session: RaySession, tmp_path: Path, family: str, engine_kind: str) -> None:
    """log mu, top-K and routes of what was loaded; the same of what two ranks sent; and the trainer's with R3."""
    folders = [tmp_path / "loaded", tmp_path / "synced"]
    for seed, folder in enumerate(folders, start=50):
        tiny_model(family, folder, seed)
    remote = RemoteEngine(
        making(folders[0], CONFIG.model_copy(update={"engine": engine_kind})), name=f"{family}-{engine_kind}"
    )
    try:
        engine = Asked(remote)
        check(engine.generate(requests(40, "loaded"), SAMPLING, training=True), load(folders[0]), version=0)
        syncs = [(str(folders[1]), 1, "broadcast")]
        assert run_ranks(sync, 2, ray_session.where, [remote.name], TP2_EP2, syncs)[0] == {}
        batch = engine.generate(requests(40, "synced"), SAMPLING, training=True)
    finally:
        remote.close()
    check(batch, load(folders[1]), version=1)
    assert batch.routes is not None
    ((replayed, live),) = run_ranks(parity_on_rank, 1, str(folders[1]), batch)
    print(f"{family}: worst gap {replayed['max_abs_logp_gap']:.2e} with R3, {live['max_abs_logp_gap']:.2e} without")
    assert replayed["max_abs_logp_gap"] <= 1e-4
    assert replayed["compared_routings"] == batch.routes.valid.sum() * batch.routes.moe_layers
