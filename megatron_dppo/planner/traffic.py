"""Bytes that move between engines and trainer in one rollout step."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dppo.models.hf_config import HFConfig
from megatron_dppo.planner.parameters import exported
from megatron_dppo.planner.workload import Workload


@dataclass(frozen=True)
class Traffic:
    """Bytes per rollout step."""

    weight_sync: int
    """bf16 weights, once per engine."""
    routes: int
    """Chosen experts of every token and MoE layer, in the narrowest unsigned type."""
    log_probs: int
    """Ids (int32) and log-probabilities (float32) of the top K and of the sampled token, of every response token."""
    tokens: int
    """Token ids and masks."""

    @property
    def rollouts(self) -> int:
        """What the object store holds of one step."""
        return self.routes + self.log_probs + self.tokens


def step_traffic(model: HFConfig, workload: Workload, engines: int) -> Traffic:
    routes = 0
    if model.moe is not None and workload.routes:
        width = 1 if model.moe.experts <= 256 else 2
        routes = workload.tokens * sum(model.moe.layers) * model.moe.topk * width
    response = workload.sequences * workload.mean_response_tokens
    return Traffic(
        weight_sync=2 * exported(model) * engines,
        routes=routes,
        log_probs=8 * response * (workload.topk + 1),
        tokens=9 * workload.tokens,
    )
