"""avg@k on held-out prompts."""

from __future__ import annotations

from megatron_dppo.rollout.protocol import RolloutEngine, SamplingLaw
from megatron_dppo.rollout.seeds import EVALUATION
from megatron_dppo.trainer.config import EvaluationConfig
from megatron_dppo.trainer.examiner import Examiner
from megatron_dppo.trainer.requests import requests_for


def evaluate(
    engine: RolloutEngine,
    examiner: Examiner,
    config: EvaluationConfig,
    *,
    max_response_tokens: int,
    run_seed: int,
    step: int,
) -> dict[str, float]:
    """Accuracy over `config.prompts` held-out prompts with `config.samples` answers each, on the engine's weights.

    Returns `eval/accuracy` (avg@k), `eval/well_formed`, `eval/reward` and `eval/response_length`. Runs on the
    controller only; the trainer's state is not touched.
    """
    prompts = examiner.task.held_out(config.prompts)
    requests = requests_for(prompts, config.samples, run_seed=run_seed, step=step, stream=EVALUATION)
    law = SamplingLaw(temperature=config.temperature, top_p=config.top_p, max_tokens=max_response_tokens)
    batch = engine.generate(requests, law, training=False)
    rewards = examiner.score(prompts, config.samples, [batch.response_ids(i) for i in range(len(batch))])
    return {
        "eval/accuracy": float(rewards.correct.mean()),
        "eval/well_formed": float(rewards.well_formed.mean()),
        "eval/reward": float(rewards.reward.mean()),
        "eval/response_length": float(batch.response_lengths.mean()),
    }
