"""vLLM's log-probabilities against Megatron-Core's, with the engine's routes replayed and without."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron_dppo.batch import RolloutBatch
from megatron_dppo.rollout.vllm_engine import VllmEngine
from tests.distributed import run_ranks
from tests.rollout.conftest import CONFIG, LAW, Served, requests
from tests.tiny import tiny_qwen3_moe


def parity_on_rank(rank: int, path: str, batch: RolloutBatch) -> tuple[dict[str, float], dict[str, float]]:
    """An fp32 Megatron-Core model on the engine's tokens: (with replay, without)."""
    from megatron_dppo.batch import InMemorySource
    from tests.router_replay.actor_ranks import build_actor

    actor = build_actor(path, {}, preset="dppo-binary-tv", mode="r3", budget=512, temperature=1.0)
    source = InMemorySource.of(batch)
    return actor.parity(source, replay=True), actor.parity(source, replay=False)


def test_replayed_log_probabilities_are_vllms(served: Served) -> None:
    ((replayed, live),) = run_ranks(parity_on_rank, 1, str(served.model), served.first)
    print(f"fp32 engine: worst gap {replayed['max_abs_logp_gap']:.2e} with R3, {live['max_abs_logp_gap']:.2e} without")
    assert replayed["max_abs_logp_gap"] <= 1e-4
    assert served.first.routes is not None
    assert replayed["compared_routings"] == served.first.routes.valid.sum() * 4


def test_replay_cuts_the_worst_gap_of_a_bf16_engine(tmp_path: Path) -> None:
    tiny_qwen3_moe(tmp_path, seed=1)
    engine = VllmEngine(tmp_path, CONFIG.model_copy(update={"dtype": "bfloat16"}))
    try:
        batch = engine.generate(requests(200, "bf16"), LAW, training=True)
    finally:
        engine.close()
    ((replayed, live),) = run_ranks(parity_on_rank, 1, str(tmp_path), batch)
    worst, without = replayed["max_abs_logp_gap"], live["max_abs_logp_gap"]
    changed = live["differing_routings"] / live["compared_routings"]
    print(f"bf16 engine, fp32 trainer: worst gap {worst:.3f} with R3, {without:.3f} without; {changed:.2%} differ")
    assert changed > 0.001, "bf16 changed no routes: the case is too easy"
    assert without > 3 * worst
    assert np.isfinite(worst)
