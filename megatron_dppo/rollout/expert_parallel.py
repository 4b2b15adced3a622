"""Whether the experts of a model can be divided among the devices of an engine (`rollout.expert_parallel`)."""

from __future__ import annotations

from megatron_dppo.compat.vllm_cpu import on_cpu
from megatron_dppo.errors import UserError
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.model_facts import ModelFacts


def check_expert_parallel(facts: ModelFacts, config: RolloutConfig) -> None:
    """Raise `UserError` where `rollout.expert_parallel` does not fit the model."""
    if not config.expert_parallel:
        return
    where = f"rollout.expert_parallel=true: {facts.folder}"
    if facts.experts == 0:
        raise UserError(f"{where} has no experts; set it to false")
    workers = config.tensor_parallel
    if facts.experts < workers:
        raise UserError(
            f"{where} has {facts.experts} experts, fewer than rollout.tensor_parallel={workers}; lower the latter"
        )
    if on_cpu() and facts.experts // workers < facts.experts_per_token:
        raise UserError(
            f"{where} runs {facts.experts_per_token} experts a token, and on a CPU each of rollout.tensor_parallel="
            f"{workers} workers must have that many of the {facts.experts}; lower the latter"
        )
