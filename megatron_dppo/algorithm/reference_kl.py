"""Keeping the policy near a fixed one: estimates of KL(pi || pi_ref) per token, for the reward or the loss."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from megatron_dppo.algorithm.divergence import kl_over_sets


class KLEstimator(StrEnum):
    """With d = log pi(y_t) - log pi_ref(y_t) of the sampled token (Schulman, "Approximating KL Divergence", 2020)."""

    K1 = "k1"
    """d. Unbiased, may be negative. In the loss its gradient is grad log pi, whose expectation under pi is 0: it then
    adds noise and keeps nothing near anything. For the reward."""
    K2 = "k2"
    """d^2 / 2. Biased as a value; in the loss its gradient, d grad log pi, is an unbiased estimate of that of
    KL(pi || pi_ref) for tokens drawn from pi."""
    K3 = "k3"
    """exp(-d) - 1 + d. Unbiased, never negative (GRPO's). In the loss its gradient is (1 - exp(-d)) grad log pi, an
    unbiased estimate of that of KL(pi_ref || pi)."""
    TOPK = "topk"
    """The KL of the two distributions over the rollout's K likeliest tokens, the sampled one and the rest (Eq. 16):
    exact but for the rest, and no sample's. In the loss its gradient is that of this sum, also exact."""


class KLPlace(StrEnum):
    """What the estimate is part of."""

    REWARD = "reward"
    """R(y) - coefficient sum_t k_t before the baseline, k_t between mu and pi_ref, without gradient."""
    LOSS = "loss"
    """+ coefficient k_t on every trained token, blocked or not, k_t between pi and pi_ref, with gradient."""


@dataclass(frozen=True, kw_only=True)
class ReferenceKL:
    """A penalty; None in its place everywhere is no penalty, and no pass of the reference."""

    coefficient: float
    """At 0 the KL is measured and nothing else changes, to the bit."""
    estimator: KLEstimator
    place: KLPlace


def kl_of_sampled(
    estimator: KLEstimator,
    logp: Float[Tensor, " T"],
    reference_logp: Float[Tensor, " T"],
    loss_mask: Bool[Tensor, " T"],
) -> Float[Tensor, " T"]:
    """k1, k2 or k3 of each row, float64, with gradient to `logp` alone; 0, also as a gradient, where `loss_mask` is.

    k3 grows as pi_ref / pi: a token that the reference likes and the policy has all but lost weighs heavily, and one
    where that ratio overflows is not finite. No collective. Raises ValueError for `topk`, which needs distributions.
    """
    d = torch.where(loss_mask != 0, logp, 0.0).double() - torch.where(loss_mask != 0, reference_logp.detach(), 0.0)
    if estimator is KLEstimator.K1:
        return d
    if estimator is KLEstimator.K2:
        return d.square() / 2
    if estimator is KLEstimator.K3:
        return torch.expm1(-d) + d
    raise ValueError(f"the estimator {estimator} is not of the sampled token alone: see kl_of_topk")


def kl_of_topk(
    logp: Float[Tensor, "T K1"],
    reference_logp: Float[Tensor, "T K1"],
    member: Bool[Tensor, "T K1"],
    loss_mask: Bool[Tensor, " T"],
) -> Float[Tensor, " T"]:
    """KL(pi || pi_ref) of each row over the members and the rest, in nats, float64, with gradient to `logp` alone; 0,
    also as a gradient, where `loss_mask` is. `divergence.topk_kl` says what members are and how the rest is floored.

    With P = the sum of pi over the members, d KL / d log pi_i = pi_i (log pi_i / pi_ref,i - log (1 - P) / (1 -
    P_ref)): finite, and 0 at pi = pi_ref. +inf where the reference has lost a token that the policy has not. No
    collective.
    """
    return kl_over_sets(logp, reference_logp.detach(), member & (loss_mask != 0)[:, None])
