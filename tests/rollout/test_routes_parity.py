"""The engine's log-probabilities against Megatron-Core's, with the engine's routes replayed and without."""

from __future__ import annotations

import numpy as np
from transformers import AutoTokenizer

from megatron_dppo.batch import RolloutBatch
from megatron_dppo.doctor.parity import Comparison, compare, spell
from megatron_dppo.doctor.parity_report import summarise
from tests.distributed import run_ranks
from tests.rollout.conftest import Served, only_vllm


def parity_on_rank(rank: int, path: str, *batches: RolloutBatch) -> list[tuple[dict[str, float], dict[str, float]]]:
    """An fp32 Megatron-Core model on the tokens of each engine: (with replay, without)."""
    from megatron_dppo.batch import InMemorySource
    from tests.router_replay.actor_ranks import build_actor

    actor = build_actor(path, {}, preset="dppo-binary-tv", mode="r3", budget=512, temperature=1.0)
    sources = [InMemorySource.of(batch) for batch in batches]
    return [(actor.parity(one, replay=True).metrics, actor.parity(one, replay=False).metrics) for one in sources]


def comparison_on_rank(rank: int, path: str, batch: RolloutBatch) -> Comparison:
    from tests.router_replay.actor_ranks import build_actor

    return compare(build_actor(path, {}, preset="dppo-binary-tv", mode="r3", budget=512, temperature=1.0), batch)


def test_replayed_log_probabilities_are_the_engines(served: Served) -> None:
    (((replayed, live),),) = run_ranks(parity_on_rank, 1, str(served.model), served.first)
    print(f"fp32 engine: worst gap {replayed['max_abs_logp_gap']:.2e} with R3, {live['max_abs_logp_gap']:.2e} without")
    assert replayed["max_abs_logp_gap"] <= 1e-4
    assert served.first.routes is not None
    assert replayed["compared_routings"] == served.first.routes.valid.sum() * 4


@only_vllm
def test_a_comparison_says_which_token_is_which(served: Served) -> None:
    """What `doctor --parity` shows of an engine in float32."""
    batch = served.first
    (found,) = run_ranks(comparison_on_rank, 1, str(served.model), batch)
    places = batch.offsets[found.sequence] + found.position
    np.testing.assert_array_equal(np.sort(places), np.flatnonzero(batch.loss_mask))
    np.testing.assert_array_equal(batch.token_ids[places], found.token_ids)
    np.testing.assert_array_equal(batch.mu_logp[places], found.mismatch.log_mu)
    passes = summarise(found)
    assert passes["on"]["logp_max"] <= 1e-4
    assert passes["on"]["tokens"] == batch.loss_mask.sum()
    tokenizer = AutoTokenizer.from_pretrained(served.model)
    before, token = spell(tokenizer, batch, 3, int(batch.prompt_lengths[3]))
    assert tokenizer.decode(batch.response_ids(3)[:1]) == token
    assert before.endswith(tokenizer.decode(batch.token_ids[batch.offsets[3] :][: batch.prompt_lengths[3]][-1:]))
