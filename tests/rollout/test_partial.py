"""Responses that a weight sync cuts: every token is exactly what the weights that sampled it say."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from megatron_dppo.batch import RolloutBatch
from megatron_dppo.rollout.stored import columns_of
from megatron_dppo.rollout.vllm_engine import VllmEngine
from megatron_dppo.router_replay.routes import Routes
from tests.rollout.conftest import LAW, Served, requests
from tests.rollout.reference import Reference, compare_law, compare_routes, model_with, other_weights, reference

LONG = replace(LAW, max_tokens=24)


def under(batch: RolloutBatch, version: int) -> RolloutBatch:
    """The batch with only the tokens that `version` sampled and the routes of its forwards."""
    assert batch.routes is not None
    valid = batch.routes.valid & (batch.routes.weight_versions == version)
    routes = Routes(batch.routes.experts, valid, batch.routes.num_experts)
    return replace(batch, loss_mask=batch.loss_mask & (batch.weight_versions == version), routes=routes)


def check(batch: RolloutBatch, version: int, expected: Reference) -> int:
    """Compare with a recomputation; returns the tokens compared."""
    part = under(batch, version)
    assert compare_law(part, expected) <= 1e-4
    compared, mismatches, _ = compare_routes(part, expected)
    assert compared > 0
    assert mismatches == 0
    return int(part.loss_mask.sum())


def test_a_cut_response_goes_on_under_the_new_weights(served_mixed: Served, tmp_path: Path) -> None:
    engine = served_mixed.engine
    assert isinstance(engine, VllmEngine)
    weights = [other_weights(served_mixed.model, seed) for seed in (21, 22)]
    served_mixed.update(old := served_mixed.next_version(), weights[0].items())
    engine.weights.cut = True
    made: list[RolloutBatch] = []
    asked = requests(60, "cut", seed=9)
    work = threading.Thread(
        target=lambda: made.append(engine.generate(asked, LONG, training=True, call="cut")), daemon=True
    )
    try:
        work.start()
        deadline = time.monotonic() + 60
        while engine.alive().get("cut", 0) == 0:  # some have ended, sixteen are under way, the others wait
            assert time.monotonic() < deadline
            time.sleep(0.002)
        served_mixed.update(new := served_mixed.next_version(), weights[1].items())
        work.join(120)
        assert not work.is_alive()
    finally:
        engine.weights.cut = False
    (batch,) = made
    assert batch.request_ids == tuple(r.request_id for r in asked)
    assert batch.routes is not None

    handle, _ = columns_of(batch, store="none", key="none", layer_groups=None)
    assert set(handle.versions.ravel().tolist()) == {old, new}
    cut = np.flatnonzero(handle.versions[:, 0] < handle.versions[:, 1])
    # At most as many as are decoded together, one of which may have ended with the token that it was cut at.
    assert 5 <= len(cut) <= engine.config.max_num_seqs
    for b in range(len(batch)):
        rows = slice(int(batch.offsets[b]), int(batch.offsets[b + 1]))
        prompt, sampled = int(batch.prompt_lengths[b]), batch.loss_mask[rows]
        assert not sampled[:prompt].any()
        assert sampled[prompt:].all()
        assert 1 <= sampled.sum() <= LONG.max_tokens
        assert (batch.finish_reasons[b] == "length") == (
            sampled.sum() == LONG.max_tokens and int(batch.token_ids[rows.stop - 1]) != 1
        )
        versions = batch.weight_versions[rows]
        assert (np.diff(versions[prompt:]) >= 0).all()
        assert (versions[:prompt] == versions[-1]).all()  # the prompt was prefilled last by the last weights
        # The forward that sampled token t + 1 routed token t; the prompt before that is of the last prefill.
        routed = batch.routes.weight_versions[rows]
        np.testing.assert_array_equal(routed[prompt - 1 : -1], versions[prompt:])
        assert (routed[: prompt - 1] == versions[-1]).all()
        assert batch.routes.valid[rows].tolist() == [True] * (len(versions) - 1) + [False]

    compared = 0
    for number, version in enumerate((old, new)):
        model = model_with(served_mixed.model, weights[number], tmp_path / str(version))
        compared += check(batch, version, reference(model, batch))
    assert compared == batch.loss_mask.sum()
