"""Real vLLM against transformers, before and after weight syncs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.rollout.conftest import LAW, Served, requests
from tests.rollout.reference import compare_law, compare_routes, load, model_with, other_weights, reference


def check(served: Served, model, name: str, count: int, temperature: float) -> int:
    """Parity of one rollout with `model`; returns the number of excused near-ties."""
    batch = served.engine.generate(
        requests(count, name, seed=count), replace(LAW, temperature=temperature), training=True
    )
    expected = reference(model, batch, temperature)
    assert compare_law(batch, expected) <= 1e-4
    rows = np.flatnonzero(batch.loss_mask)
    assert batch.top_k == 20
    # The engine's K are the K likeliest, likeliest first (ties within float noise may swap places).
    best = -np.sort(-expected.law[rows], axis=1)[:, :20]
    np.testing.assert_allclose(batch.topk_logp[rows], best, atol=1e-4)
    assert (np.diff(batch.topk_logp[rows], axis=1) <= 0).all()
    assert (batch.topk_ids[~batch.loss_mask] == -1).all()
    compared, mismatches, excused = compare_routes(batch, expected)
    assert mismatches == 0
    assert batch.routes is not None
    assert compared == batch.routes.valid.sum() * batch.routes.moe_layers
    assert batch.routes.valid.sum() == len(batch.token_ids) - len(batch)
    assert excused <= compared // 1000
    assert (batch.weight_versions == served.version).all()
    return excused


def test_laws_top_k_and_routes_equal_transformers_before_and_after_syncs(served: Served, tmp_path: Path) -> None:
    """200 sequences with prefix-cache hits, two temperatures; the engine starts at version 0."""
    check(served, load(served.model), "before", 200, temperature=1.0)
    check(served, load(served.model), "warm", 20, temperature=0.7)
    for round_ in (1, 2):
        weights = other_weights(served.model, seed=round_)
        served.engine.update_weights(served.next_version(), weights.items())
        assert served.engine.weight_version == served.version
        model = model_with(served.model, weights, tmp_path / str(round_))
        check(served, model, f"after-{round_}", 40, temperature=1.3 - 0.3 * round_)


def test_dense_layers_and_tied_embeddings(served_mixed: Served, tmp_path: Path) -> None:
    model = load(served_mixed.model)
    check(served_mixed, model, "before", 30, temperature=1.0)
    batch = served_mixed.engine.generate(requests(2, "shape"), LAW, training=True)
    assert batch.routes is not None
    assert batch.routes.moe_layers == 3
    weights = other_weights(served_mixed.model, seed=5)
    assert "lm_head.weight" not in weights
    served_mixed.engine.update_weights(served_mixed.next_version(), weights.items())
    check(served_mixed, model_with(served_mixed.model, weights, tmp_path / "new"), "after", 30, temperature=1.0)


def test_stop_tokens_and_the_limit_are_told_apart(served_mixed: Served) -> None:
    free = served_mixed.engine.generate(requests(40, "free", seed=3), LAW, training=True)
    sampled = free.token_ids[free.loss_mask]
    stop = int(np.bincount(sampled).argmax())
    batch = served_mixed.engine.generate(
        requests(40, "stops", seed=3), replace(LAW, stop_token_ids=(stop,)), training=True
    )
    assert {"stop", "length"} == set(batch.finish_reasons)
    for b, reason in enumerate(batch.finish_reasons):
        response = batch.response_ids(b)
        enders = {1, stop}
        assert (response[-1] in enders) == (reason == "stop")
        assert not enders & set(response[:-1].tolist())
        if reason == "length":
            assert len(response) == LAW.max_tokens


@pytest.mark.parametrize("top_k", [0, 3, 400])
def test_any_number_of_recorded_ids(served_mixed: Served, top_k: int) -> None:
    """More than the vocabulary: the rest of the columns are absent."""
    batch = served_mixed.engine.generate(requests(6, f"k{top_k}"), replace(LAW, top_k_logprobs=top_k), training=True)
    assert batch.topk_ids.shape == (len(batch.token_ids), top_k)
    rows = batch.loss_mask
    held = min(top_k, 300)
    assert (batch.topk_ids[rows][:, :held] >= 0).all()
    assert (batch.topk_ids[:, held:] == -1).all()
    assert (batch.topk_logp[:, held:] == -np.inf).all()
    if top_k == 400:
        np.testing.assert_allclose(np.exp(batch.topk_logp[rows].astype(np.float64)).sum(axis=1), 1, atol=1e-5)
