"""The algorithms of "Rethinking the Trust Region in LLM Reinforcement Learning" as pure functions over tensors.

Every function takes flat [T] rows of a packed microbatch (`[T, K+1]` for top-K), works on any device, knows no
process group and no configuration. In the order of use: `presets.get` -> `divergence_for` -> `policy_loss` ->
`aggregate`, with `group_advantages` before and `TokenMetrics` after.
"""

from megatron_dppo.algorithm import presets
from megatron_dppo.algorithm.advantage import (
    AdvantageEstimator,
    Baseline,
    group_advantages,
    own_advantages,
    try_advantages,
)
from megatron_dppo.algorithm.aggregation import (
    Aggregation,
    Denominators,
    aggregate,
    token_weights,
)
from megatron_dppo.algorithm.divergence import DIVERGENCES, Divergence, DivergenceInputs, Needs
from megatron_dppo.algorithm.metrics import TokenMetrics, masked_token_counts, most_masked_tokens
from megatron_dppo.algorithm.objective import PolicyLoss, divergence_for, policy_loss
from megatron_dppo.algorithm.own_loss import LossInputs, try_own_code
from megatron_dppo.algorithm.preset import Anchor, Preset, PresetError, RatioLevel, TrustRegion
from megatron_dppo.algorithm.reference_kl import KLEstimator, KLPlace, ReferenceKL, kl_of_sampled, kl_of_topk

__all__ = [
    "DIVERGENCES",
    "AdvantageEstimator",
    "Aggregation",
    "Anchor",
    "Baseline",
    "Denominators",
    "Divergence",
    "DivergenceInputs",
    "KLEstimator",
    "KLPlace",
    "LossInputs",
    "Needs",
    "PolicyLoss",
    "Preset",
    "PresetError",
    "RatioLevel",
    "ReferenceKL",
    "TokenMetrics",
    "TrustRegion",
    "aggregate",
    "divergence_for",
    "group_advantages",
    "kl_of_sampled",
    "kl_of_topk",
    "masked_token_counts",
    "most_masked_tokens",
    "own_advantages",
    "policy_loss",
    "presets",
    "token_weights",
    "try_advantages",
    "try_own_code",
]
