"""Divergence between the policy that is trained and the policy that the trust region is anchored to.

Everything here is computed in float64, whatever comes in, and carries no gradient: a divergence only decides
masks and metrics. The KL is D(anchor || policy), as in the paper; the arguments are named for the usual anchor, mu.

A float32 log-probability of a near-certain token is often exactly 0, so the complement 1 - p of such a token
is known to about 1e-7 and no better. Every complement (1 - p, and the "other" bucket of top-K) is therefore
floored at COMPLEMENT_FLOOR on *both* sides. Without it the KL of a healthy near-certain token is +inf,
or NaN, and the token would be masked.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

COMPLEMENT_FLOOR = 1e-6
"""Smallest mass that a complement can have; far below every threshold in use (0.05 and up)."""


def _log_probability(logp: Tensor) -> Tensor:
    """float64, without gradient, at most 0: rounding may leave a log-probability slightly above 0."""
    return logp.detach().double().clamp(max=0.0)


def _kl_terms(mu: Tensor, mu_logp: Tensor, pi_logp: Tensor) -> Tensor:
    """mu log(mu / pi) elementwise, with 0 log(0 / x) = 0 also where x = 0; +inf where pi = 0 < mu."""
    return torch.where(mu > 0, mu * (mu_logp - pi_logp), 0.0)


@torch.no_grad()
def binary_tv(mu_logp: Float[Tensor, "*T"], pi_logp: Float[Tensor, "*T"]) -> Float[Tensor, "*T"]:
    """|mu(a) - pi(a)| of the sampled token a (Eq. 13).

    Args: log-probabilities of the sampled token, any shape. Returns float64 in [0, 1]. No gradient, no collective.
    """
    return (_log_probability(mu_logp).exp() - _log_probability(pi_logp).exp()).abs()


@torch.no_grad()
def binary_kl(mu_logp: Float[Tensor, "*T"], pi_logp: Float[Tensor, "*T"]) -> Float[Tensor, "*T"]:
    """mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)) of the sampled token (Eq. 14), in nats.

    Args: log-probabilities of the sampled token, any shape. Returns float64 >= 0; +inf only where pi = 0 < mu.
    Complements are floored (module docstring). No gradient, no collective.
    """
    mu_logp, pi_logp = _log_probability(mu_logp), _log_probability(pi_logp)
    # expm1 keeps the digits of 1 - p that 1 - exp(logp) would cancel.
    mu_rest = (-torch.expm1(mu_logp)).clamp(min=COMPLEMENT_FLOOR)
    pi_rest = (-torch.expm1(pi_logp)).clamp(min=COMPLEMENT_FLOOR)
    kl = _kl_terms(mu_logp.exp(), mu_logp, pi_logp) + mu_rest * (mu_rest / pi_rest).log()
    # The floors add up to 1e-6 of mass to one side alone, which can push a vanishing KL just below 0.
    return kl.clamp(min=0.0)


def _members(logp: Tensor, member: Tensor) -> Tensor:
    return torch.where(member, _log_probability(logp), -torch.inf)


def _other(probability: Tensor) -> Tensor:
    """Mass of the tokens outside the set; engines round, so a set can sum to slightly more than 1."""
    return (1.0 - probability.sum(-1)).clamp(min=COMPLEMENT_FLOOR)


def _check_topk(mu_logp: Tensor, pi_logp: Tensor, member: Tensor) -> None:
    if not mu_logp.shape == pi_logp.shape == member.shape:
        raise ValueError(
            f"top-K divergence needs equal shapes [T, K+1]: mu_logp {tuple(mu_logp.shape)}, "
            f"pi_logp {tuple(pi_logp.shape)}, member {tuple(member.shape)}"
        )
    if member.dtype != torch.bool:
        raise ValueError(f"member must be boolean, one flag per column, not {member.dtype}")


@torch.no_grad()
def topk_tv(
    mu_logp: Float[Tensor, "*T K1"],
    pi_logp: Float[Tensor, "*T K1"],
    member: Bool[Tensor, "*T K1"],
    *,
    include_other: bool = True,
) -> Float[Tensor, "*T"]:
    """1/2 sum over A' and "other" of |mu - pi| (Eq. 15 with the "other" bucket of Appendix C.1).

    The set is A' = TopK(mu, K) united with the sampled token: K columns in the engine's order and one more for
    the sampled token, which `member` counts only where it is not among the K. Columns outside `member` may hold
    anything, NaN included. `include_other=False` leaves the bucket out, which is Eq. 15 to the letter: the
    equation sums over A' although the paper's lower bound and its Eq. 16 are over A''.

    Returns float64 [T] in [0, 1]. Raises ValueError on unequal shapes. No gradient, no collective.
    """
    _check_topk(mu_logp, pi_logp, member)
    mu, pi = _members(mu_logp, member).exp(), _members(pi_logp, member).exp()
    distance = (mu - pi).abs().sum(-1)
    if include_other:
        distance = distance + (_other(mu) - _other(pi)).abs()
    return (0.5 * distance).clamp(max=1.0)


@torch.no_grad()
def topk_kl(
    mu_logp: Float[Tensor, "*T K1"], pi_logp: Float[Tensor, "*T K1"], member: Bool[Tensor, "*T K1"]
) -> Float[Tensor, "*T"]:
    """Sum over A'' = A' and "other" of mu log(mu / pi) (Eq. 16), in nats.

    Arguments as in `topk_tv`. Returns float64 [T] >= 0; +inf only where a member has pi = 0 < mu (the "other"
    bucket is floored, so it cannot cause one). Raises ValueError on unequal shapes. No gradient, no collective.
    """
    _check_topk(mu_logp, pi_logp, member)
    mu_logp, pi_logp = _members(mu_logp, member), _members(pi_logp, member)
    mu, pi = mu_logp.exp(), pi_logp.exp()
    mu_other, pi_other = _other(mu), _other(pi)
    kl = _kl_terms(mu, mu_logp, pi_logp).sum(-1) + mu_other * (mu_other / pi_other).log()
    return kl.clamp(min=0.0)
