"""Every engine against transformers' forward of whole sequences, before and after weight syncs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel

from megatron_dppo.batch import RolloutBatch
from megatron_dppo.rollout.engine import update_weights
from megatron_dppo.rollout.reference.core import ReferenceEngine
from tests.rollout.conftest import CONFIG, SAMPLING, Served, only_vllm, requests
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


@only_vllm
def test_two_engines_say_the_same_of_200_prompts(served: Served, tmp_path: Path) -> None:
    """vLLM's sampled answers scored by transformers, and greedy answers of both with cached keys, in float32."""
    weights = other_weights(served.model, seed=8)
    served.update(served.next_version(), weights.items())
    asked, greedy = requests(200, "both", seed=7), replace(SAMPLING, temperature=0.0)
    batch = served.engine.generate(asked, SAMPLING, training=True)
    ours = served.engine.generate(asked, greedy, training=False)
    engine = ReferenceEngine(served.model, CONFIG)
    try:
        update_weights(engine, 1, weights.items(), bucket_mib=1)
        said = engine.score(batch, SAMPLING.temperature)
        drawn = engine.generate(asked, SAMPLING, training=True)
        theirs = engine.generate(asked, greedy, training=False)
    finally:
        engine.close()

    rows = batch.loss_mask
    sampled = np.abs(said.mu_logp - batch.mu_logp)[rows].max()
    likeliest = np.abs(said.topk_logp - batch.topk_logp)[rows].max()
    assert said.routes is not None
    assert batch.routes is not None
    mine, other = (np.sort(one.experts, axis=-1) for one in (batch.routes, said.routes))
    differ = (mine != other).any(axis=-1) & batch.routes.valid[:, None]
    margin = reference(model_with(served.model, weights, tmp_path / "w"), batch).margin
    print(f"{rows.sum()} sampled tokens: log mu {sampled:.1e}, top-20 {likeliest:.1e} nats apart")
    print(f"{differ.sum()} of {batch.routes.valid.sum() * batch.routes.moe_layers} routes differ")
    assert max(sampled, likeliest) <= 2e-5
    assert (margin[differ] < 1e-6).all()

    # Both take torch's exponential noise from a generator with the request's seed (`test_drawing.py`).
    alike = [np.array_equal(batch.response_ids(b), drawn.response_ids(b)) for b in range(len(asked))]
    print(f"{sum(alike)} of {len(asked)} sampled answers are the same")
    assert sum(alike) > 0.9 * len(asked)

    worst, tokens = 0.0, 0
    for b in range(len(asked)):
        pair = [one.response_ids(b) for one in (ours, theirs)]
        count = min(map(len, pair))
        unlike = np.flatnonzero(pair[0][:count] != pair[1][:count])
        same = int(unlike[0]) if len(unlike) else count  # after that they answer something else
        starts = [int(one.offsets[b] + one.prompt_lengths[b]) for one in (ours, theirs)]
        one, two = (side.mu_logp[at : at + same] for side, at in zip((ours, theirs), starts, strict=True))
        worst, tokens = max(worst, float(np.abs(one - two).max(initial=0.0))), tokens + same
    print(f"{tokens} of {ours.loss_mask.sum()} greedy tokens alike: {worst:.1e} nats apart")
    assert worst <= 2e-5
    assert tokens > 0.95 * ours.loss_mask.sum()  # another one where two are equally likely


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
