"""Engines of the other families, against transformers and the trainer, before and after a sync from sharded ranks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_dppo.errors import UserError
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.engine import RolloutEngine, SamplingConfig
from megatron_dppo.rollout.fleet.host import RemoteEngine
from megatron_dppo.rollout.ray_session import RaySession
from megatron_dppo.rollout.start import open_engine
from tests.actor.matrix import FAMILIES, KIN
from tests.actor.reference import moe_blocks
from tests.distributed import run_ranks
from tests.rollout.conftest import CONFIG, KINDS, SAMPLING, Asked, making, requests
from tests.rollout.reference import compare_routes, load, reference
from tests.rollout.sync_ranks import sync
from tests.rollout.test_parity import check
from tests.rollout.test_routes_parity import parity_on_rank
from tests.tiny import SEEING, tiny_model

TP2_EP2 = {"tensor": 2, "expert": 2, "sequence_parallel": True}


NOT_ON_A_CPU = {"qwen3_next", "qwen3_5_moe", "gpt_oss"}
"""Families that vLLM does not decode on a CPU."""
SIZES = {"minimax_m2": {"intermediate_size": 48}}
"""Of experts, which vLLM's grouped product on a CPU would not take."""


def what_is_wrongly_quantised(engine: Any) -> list[list[str]]:
    return engine._loop.run(engine.core.engine.collective_rpc("wrongly_quantised"))


class Place:
    """Holds the engine of one family after another: what its process has imported, ten seconds for vLLM, stays."""

    weight_version = 0
    _engine: RolloutEngine | None = None

    def open(self, model: Path, config: RolloutConfig) -> None:
        self._engine = open_engine(model, config)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@pytest.fixture(scope="module")
def places(ray_session: RaySession) -> Iterator[dict[str, RemoteEngine]]:
    """By kind of engine."""
    made: dict[str, RemoteEngine] = {}
    yield made
    for place in made.values():
        place.close()


NUMBERS = count()


@contextmanager
def opened(places: dict[str, RemoteEngine], kinds: list[str], model: Path) -> Iterator[list[RemoteEngine]]:
    """An engine of each kind, all at once. After an error the next family has processes of its own."""
    try:
        for kind in kinds:
            if kind not in places:
                places[kind] = RemoteEngine(Place, name=f"families-{kind}-{next(NUMBERS)}")
        for ready in [
            places[kind].ask(
                partial(Place.open, model=model, config=CONFIG.model_copy(update={"engine": kind})), "work"
            )
            for kind in kinds
        ]:
            ready.result()
        yield [places[kind] for kind in kinds]
        for ended in [places[kind].ask(Place.close, "weights") for kind in kinds]:
            ended.result()
    except BaseException:
        for kind in kinds:
            if kind in places:
                places.pop(kind).close()
        raise


@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(family, marks=pytest.mark.full) for family in KIN)])
def test_engines_of_the_family(
    ray_session: RaySession, places: dict[str, RemoteEngine], tmp_path: Path, family: str
) -> None:
    """log mu, top-K and routes of what was loaded; the same of what two ranks sent to all engines at once; and the
    trainer's with R3."""
    folders = [tmp_path / "loaded", tmp_path / "synced"]
    for seed, folder in enumerate(folders, start=50):
        tiny_model(family, folder, seed, **SIZES.get(family, {}))
    loaded, sent = (load(folder) for folder in folders)
    kinds = [kind for kind in KINDS if kind != "vllm" or family not in NOT_ON_A_CPU]
    with opened(places, kinds, folders[0]) as remotes:
        engines = [Asked(remote) for remote in remotes]
        for kind, remote, engine in zip(kinds, remotes, engines, strict=True):
            if kind == "vllm":  # the routers are found, which `rollout.quantization` must leave alone
                assert remote.ask(what_is_wrongly_quantised, "control").result() == [["no layer is quantised"]]
            check(engine.generate(requests(40, "loaded"), SAMPLING, training=True), loaded, version=0)
        syncs = [(str(folders[1]), 1, "broadcast")]
        names = [remote.name for remote in remotes]
        assert run_ranks(sync, 2, ray_session.where, names, TP2_EP2, syncs)[0] == {}
        batches = [engine.generate(requests(40, "synced"), SAMPLING, training=True) for engine in engines]
    (parities,) = run_ranks(parity_on_rank, 1, str(folders[1]), *batches)
    for kind, batch, (replayed, live) in zip(kinds, batches, parities, strict=True):
        check(batch, sent, version=1)
        assert batch.routes is not None
        gaps = f"{replayed['max_abs_logp_gap']:.2e} with R3, {live['max_abs_logp_gap']:.2e} without"
        print(f"{family}, {kind}: worst gap {gaps}")
        assert replayed["max_abs_logp_gap"] <= 1e-4
        assert replayed["compared_routings"] == batch.routes.valid.sum() * batch.routes.moe_layers


@pytest.mark.parametrize("family", sorted(NOT_ON_A_CPU))
def test_what_vllm_lacks_on_a_cpu_is_refused(tmp_path: Path, family: str) -> None:
    from megatron_dppo.rollout.vllm.start import open_engine

    tiny_model(family, tmp_path)
    with pytest.raises(UserError, match=r"rollout\.engine=vllm: .* set rollout\.engine=reference"):
        open_engine(tmp_path, CONFIG)


def test_a_model_that_vllm_does_not_have_is_named(tmp_path: Path) -> None:
    """As one that a package brings, in place of pydantic's page with all models that there are."""
    from megatron_dppo.rollout.model_facts import ModelFacts
    from megatron_dppo.rollout.vllm.start import start_vllm

    tiny_model("mistral", tmp_path, sliding_window=None)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["LabForCausalLM"]}))
    with pytest.raises(UserError, match=r"vLLM \S+ has no LabForCausalLM; set rollout\.engine=reference"):
        asyncio.run(start_vllm(ModelFacts.read(tmp_path, router_replay=False), CONFIG))


def unchecked(folder: Path, config: RolloutConfig) -> RolloutEngine:
    """`open_engine` without what it refuses."""
    from megatron_dppo.rollout.model_facts import ModelFacts
    from megatron_dppo.rollout.serving.engine import ServedEngine
    from megatron_dppo.rollout.vllm.start import CoreLoop, start_vllm

    facts = ModelFacts.read(folder, router_replay=True)
    return ServedEngine(facts, config, CoreLoop("vllm-engine"), partial(start_vllm, facts, config))


@pytest.mark.full
@pytest.mark.parametrize(("family", "workers"), [*((family, 1) for family in sorted(NOT_ON_A_CPU)), ("gpt_oss", 2)])
def test_vllm_in_half_precision_has_what_was_sent(
    ray_session: RaySession, tmp_path: Path, family: str, workers: int
) -> None:
    """After a sync the same first token of each answer as an engine that loaded those weights. Prefill works."""
    if family in SEEING:
        pytest.importorskip("torchvision", reason="vLLM's class imports it, and without a GPU it is not installed")
    folders = [tmp_path / "loaded", tmp_path / "synced"]
    heads = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}  # multiples of 32 there
    for seed, folder in enumerate(folders, start=50):
        tiny_model(family, folder, seed, dtype=torch.bfloat16, **heads)
    config = CONFIG.model_copy(update={"dtype": "bfloat16", "tensor_parallel": workers})
    one_token = SamplingConfig(max_tokens=1, top_k_logprobs=5)
    found = []
    for number, folder in enumerate(folders):
        remote = RemoteEngine(partial(unchecked, folder, config), name=f"{family}-half-{number}")
        try:
            if number == 0:
                syncs = [(str(folders[1]), 1, "broadcast")]
                assert run_ranks(sync, 2, ray_session.where, [remote.name], TP2_EP2, syncs, workers)[0] == {}
            found.append(Asked(remote).generate(requests(40, "half"), one_token, training=True))
        finally:
            remote.close()
    sent, loaded = found
    assert loaded.routes is not None
    assert sent.routes is not None
    np.testing.assert_array_equal(sent.token_ids, loaded.token_ids)
    np.testing.assert_allclose(sent.mu_logp, loaded.mu_logp, atol=1e-3)
    assert (sent.routes.experts == loaded.routes.experts).mean() > 0.99


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES + KIN)
def test_fifty_thousand_routes_are_transformers(ray_session: RaySession, tmp_path: Path, family: str) -> None:
    """(token, layer) pairs of vLLM; a tie within rounding is none of them."""
    model = tiny_model(family, tmp_path / "model", seed=60)
    layers = len(moe_blocks(model))
    kind = "reference" if family in NOT_ON_A_CPU else "vllm"
    config = CONFIG.model_copy(update={"engine": kind})
    remote = RemoteEngine(making(tmp_path / "model", config), name=f"{family}-many")
    compared = mismatches = excused = 0
    try:
        engine = Asked(remote)
        for part in range(1000):
            batch = engine.generate(requests(200, f"many-{part}", seed=part), SAMPLING, training=True)
            found = compare_routes(batch, reference(load(tmp_path / "model"), batch))
            compared, mismatches, excused = (a + b for a, b in zip((compared, mismatches, excused), found, strict=True))
            if compared > 50_000:
                break
    finally:
        remote.close()
    print(f"{family}: {mismatches} of {compared} routes in {layers} layers differ, {excused} were ties")
    assert mismatches == 0
    assert excused <= compared // 1000
