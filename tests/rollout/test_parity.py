"""Real vLLM against transformers, before and after weight syncs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel

from megatron_dppo.batch import RolloutBatch
from tests.rollout.conftest import SAMPLING, Served, requests
from tests.rollout.reference import compare_law, compare_routes, load, model_with, other_weights, reference


def check(batch: RolloutBatch, model: PreTrainedModel, version: int, temperature: float = 1.0) -> None:
    expected = reference(model, batch, temperature)
    assert compare_law(batch, expected) <= 1e-4
    rows = np.flatnonzero(batch.loss_mask)
    assert batch.top_k == 20
    # The engine's K are the K likeliest, likeliest first (ties within float noise may swap places).
    best = -np.sort(-expected.logps[rows], axis=1)[:, :20]
    np.testing.assert_allclose(batch.topk_logp[rows], best, atol=1e-4)
    assert (np.diff(batch.topk_logp[rows], axis=1) <= 0).all()
    assert (batch.topk_ids[~batch.loss_mask] == -1).all()
    compared, mismatches, excused = compare_routes(batch, expected)
    assert mismatches == 0
    assert batch.routes is not None
    assert compared == batch.routes.valid.sum() * batch.routes.moe_layers
    assert batch.routes.valid.sum() == len(batch.token_ids) - len(batch)
    assert excused <= compared // 1000
    assert (batch.weight_versions == version).all()


def sync_and_check(served: Served, folder: Path, seed: int, temperature: float) -> None:
    weights = other_weights(served.model, seed)
    served.update(served.next_version(), weights.items())
    assert served.engine.weight_version == served.version
    sampling = replace(SAMPLING, temperature=temperature)
    batch = served.engine.generate(requests(40, f"after-{seed}", seed), sampling, training=True)
    check(batch, model_with(served.model, weights, folder), served.version, temperature)


def test_the_loaded_checkpoint_equals_transformers(served: Served) -> None:
    """200 sequences with prefix-cache hits: log mu, top-K and routes."""
    check(served.first, load(served.model), version=0)


@pytest.mark.parametrize(("seed", "temperature"), [(1, 1.0), (2, 0.7)])
def test_synced_weights_equal_transformers(served: Served, tmp_path: Path, seed: int, temperature: float) -> None:
    sync_and_check(served, tmp_path, seed, temperature)


def test_dense_layers_and_tied_embeddings(served_mixed: Served, tmp_path: Path) -> None:
    check(served_mixed.first, load(served_mixed.model), version=0)
    assert served_mixed.first.routes is not None
    assert served_mixed.first.routes.moe_layers == 3
    assert "lm_head.weight" not in other_weights(served_mixed.model, 0)
    sync_and_check(served_mixed, tmp_path, seed=5, temperature=1.0)


def test_stop_tokens_and_the_limit_are_told_apart(served_mixed: Served) -> None:
    free = served_mixed.engine.generate(requests(40, "free", seed=3), SAMPLING, training=True)
    sampled = free.token_ids[free.loss_mask]
    stop = int(np.bincount(sampled).argmax())
    batch = served_mixed.engine.generate(
        requests(40, "stops", seed=3), replace(SAMPLING, stop_token_ids=(stop,)), training=True
    )
    assert {"stop", "length"} == set(batch.finish_reasons)
    for b, reason in enumerate(batch.finish_reasons):
        response = batch.response_ids(b)
        enders = {1, stop}
        assert (response[-1] in enders) == (reason == "stop")
        assert not enders & set(response[:-1].tolist())
        if reason == "length":
            assert len(response) == SAMPLING.max_tokens


@pytest.mark.parametrize("top_k", [0, 3, 400])
def test_any_number_of_recorded_ids(served_mixed: Served, top_k: int) -> None:
    """More than the vocabulary: the rest of the columns are absent."""
    batch = served_mixed.engine.generate(
        requests(6, f"k{top_k}"), replace(SAMPLING, top_k_logprobs=top_k), training=True
    )
    assert batch.topk_ids.shape == (len(batch.token_ids), top_k)
    rows = batch.loss_mask
    held = min(top_k, 300)
    assert (batch.topk_ids[rows][:, :held] >= 0).all()
    assert (batch.topk_ids[:, held:] == -1).all()
    assert (batch.topk_logp[:, held:] == -np.inf).all()
    if top_k == 400:
        np.testing.assert_allclose(np.exp(batch.topk_logp[rows].astype(np.float64)).sum(axis=1), 1, atol=1e-5)
