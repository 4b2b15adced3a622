"""Divergence between the policy that is trained and the policy that the trust region is anchored to: the functions, and
`DIVERGENCES`, the table of them that the presets, their checks and the objective read.

Everything here is computed in float64, whatever comes in, and but for `kl_over_sets` carries no gradient: a divergence
only decides masks and metrics. The KL is D(anchor || policy), as in the paper; the arguments are named for the usual
anchor, mu.

A float32 log-probability of a near-certain token is often exactly 0, so the complement 1 - p of such a token
is known to about 1e-7 and no better. Every complement (1 - p, and the "other" bucket of top-K) is therefore
floored at COMPLEMENT_FLOOR on *both* sides. Without it the KL of a healthy near-certain token is +inf,
or NaN, and the token would be masked.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from megatron_dppo.errors import did_you_mean
from megatron_dppo.launch.imports import load_callable

COMPLEMENT_FLOOR = 1e-6
"""Smallest mass that a complement can have; far below every threshold in use (0.05 and up)."""


def _log_probability(logp: Tensor) -> Tensor:
    """float64, at most 0: rounding may leave a log-probability slightly above 0."""
    return logp.double().clamp(max=0.0)


def _kl_terms(mu: Tensor, mu_logp: Tensor, pi_logp: Tensor) -> Tensor:
    """mu log(mu / pi) elementwise, with 0 log(0 / x) = 0 also where x = 0; +inf where pi = 0 < mu."""
    # Selected before the product: the derivative of what is selected after it would be 0 times infinity.
    return mu * torch.where(mu > 0, mu_logp - pi_logp, 0.0)


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
    return kl_over_sets(mu_logp, pi_logp, member)


def kl_over_sets(
    mu_logp: Float[Tensor, "*T K1"], pi_logp: Float[Tensor, "*T K1"], member: Bool[Tensor, "*T K1"]
) -> Float[Tensor, "*T"]:
    """`topk_kl` with the gradient to both sides; where a bucket is held at the floor, none flows through it."""
    _check_topk(mu_logp, pi_logp, member)
    mu_logp, pi_logp = _members(mu_logp, member), _members(pi_logp, member)
    mu, pi = mu_logp.exp(), pi_logp.exp()
    mu_other, pi_other = _other(mu), _other(pi)
    kl = _kl_terms(mu, mu_logp, pi_logp).sum(-1) + mu_other * (mu_other / pi_other).log()
    return kl.clamp(min=0.0)


class Needs(StrEnum):
    """What of the two distributions a divergence is computed from."""

    SAMPLED = "sampled"
    """The log-probability of the sampled token alone: nothing to record or recompute besides."""
    TOPK = "topk"
    """The engine's K likeliest tokens as well (`rollout.top_k_logprobs`)."""
    VOCABULARY = "vocabulary"
    """Every token: top-K with K the size of the vocabulary, so for small ones only."""


@dataclass(frozen=True, kw_only=True)
class DivergenceInputs:
    """What a divergence is given of T rows. No gradient flows from it; rows that are not trained hold anything."""

    anchor_logp: Float[Tensor, " T"]
    """Log-probability of the sampled token under the policy that the trust region is anchored to."""
    logp: Float[Tensor, " T"]
    """The same under the policy that is trained."""
    anchor_topk_logp: Float[Tensor, "T K1"] | None = None
    """Log-probabilities of the rollout's K likeliest ids under the anchor, and in the last column of the sampled token;
    None where only the sampled token is needed."""
    topk_logp: Float[Tensor, "T K1"] | None = None
    """The same ids under the policy that is trained."""
    member: Bool[Tensor, "T K1"] | None = None
    """Columns that count: the sampled token's own does where it is not among the K."""
    include_other: bool = True
    """`Preset.include_other`: whether top-K TV counts the "other" bucket."""

    def topk(self) -> tuple[Tensor, Tensor, Tensor]:
        """`anchor_topk_logp`, `topk_logp` and `member`; ValueError for a row that did not say that it needs them."""
        if self.anchor_topk_logp is None or self.topk_logp is None or self.member is None:
            raise ValueError("top-K log-probabilities come to divergences that say needs=Needs.TOPK alone")
        return self.anchor_topk_logp, self.topk_logp, self.member


@dataclass(frozen=True)
class Divergence:
    """A row of `DIVERGENCES`, or one of a user's own (`algorithm.divergence: package.module:NAME`)."""

    function: Callable[[DivergenceInputs], Float[Tensor, " T"]]
    """D(anchor || pi) of each row, 0 or more, +inf included, never NaN. Called without gradient: it decides a mask."""
    needs: Needs = Needs.SAMPLED
    thresholds: Mapping[str, float] = field(default_factory=dict)
    """delta by set of constants (`presets`); the first is the default. Without any the configuration must give both."""
    can_leave_other_out: bool = False
    """Whether `include_other=False` has a meaning."""

    def __call__(self, inputs: DivergenceInputs) -> Float[Tensor, " T"]:
        """float64 `[T]` without gradient. Raises ValueError for a function that returns anything but `[T]` numbers."""
        with torch.no_grad():
            found = self.function(inputs)
        if not isinstance(found, Tensor) or found.shape != inputs.logp.shape or not found.is_floating_point():
            what = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(f"must return one floating number per row, {list(inputs.logp.shape)}, and returned {what}")
        return found.detach().double()


def _deltas(d: float, f: float, lora: float) -> dict[str, float]:
    """delta of Appendix F, of its LoRA run and of Appendix D."""
    return {"appendix-f": f, "appendix-f-lora": lora, "appendix-d": d}


DIVERGENCES: dict[str, Divergence] = {
    "binary-tv": Divergence(lambda x: binary_tv(x.anchor_logp, x.logp), thresholds=_deltas(0.15, 0.2, 0.15)),
    "binary-kl": Divergence(lambda x: binary_kl(x.anchor_logp, x.logp), thresholds=_deltas(0.05, 0.05, 0.05)),
    "topk-tv": Divergence(
        lambda x: topk_tv(*x.topk(), include_other=x.include_other),
        Needs.TOPK,
        _deltas(0.15, 0.2, 0.15),
        can_leave_other_out=True,
    ),
    "topk-kl": Divergence(lambda x: topk_kl(*x.topk()), Needs.TOPK, _deltas(0.05, 0.05, 0.05)),
}
"""Every approximation of Section 4.4. A row gives the presets `dppo-NAME` and `dppo-NAME-decoupled`."""


def find_divergence(name: str) -> Divergence:
    """The row `name`, or what the import path `package.module:NAME` leads to: a `Divergence`, or a function, which is
    one that needs the sampled token alone. Raises ValueError for an unknown name, UserError for a wrong path."""
    if name in DIVERGENCES:
        return DIVERGENCES[name]
    if ":" not in name:
        known, hint = ", ".join(DIVERGENCES), did_you_mean(name, DIVERGENCES)
        raise ValueError(f"divergence={name!r} is not one of {known}, nor an import path{hint}")
    found = load_callable(name, named="algorithm.divergence=")
    return found if isinstance(found, Divergence) else Divergence(found)
