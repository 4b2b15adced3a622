"""Every preset's mask, value and gradient against formulas written out token by token from Appendices D and F.

The reference knows no Preset: each algorithm is spelled here in plain Python floats, its constants as printed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_dppo.algorithm import divergence_for, policy_loss, presets

K = 3


@dataclass(frozen=True)
class Token:
    """One row: probabilities of the sampled token under mu, pi and pi', and of K+1 columns under each."""

    mu: float
    pi: float
    re: float
    advantage: float
    mu_set: tuple[float, ...]
    pi_set: tuple[float, ...]
    re_set: tuple[float, ...]
    sampled_in_topk: bool

    def columns(self, policy: str) -> list[float]:
        """K columns, then the sampled token's own."""
        return [*getattr(self, f"{policy}_set"), getattr(self, policy)]

    @property
    def member(self) -> list[bool]:
        return [True] * K + [not self.sampled_in_topk]


def kl_term(mu: float, pi: float) -> float:
    return 0.0 if mu == 0 else math.inf if pi == 0 else mu * (math.log(mu) - math.log(pi))


def divide(a: float, b: float) -> float:
    return a / b if b else math.inf if a else math.nan


def binary_tv(t: Token, anchor: str) -> float:
    return abs(getattr(t, anchor) - t.pi)


def binary_kl(t: Token, anchor: str) -> float:
    mu = getattr(t, anchor)
    return kl_term(mu, t.pi) + kl_term(max(1 - mu, 1e-6), max(1 - t.pi, 1e-6))


def members(t: Token, policy: str) -> list[float]:
    return [p for p, counts in zip(t.columns(policy), t.member, strict=True) if counts]


def rest(values: list[float]) -> float:
    return max(1 - math.fsum(values), 1e-6)


def topk_tv(t: Token, anchor: str) -> float:
    a, p = members(t, anchor), members(t, "pi")
    return min(0.5 * (math.fsum(abs(x - y) for x, y in zip(a, p, strict=True)) + abs(rest(a) - rest(p))), 1.0)


def topk_kl(t: Token, anchor: str) -> float:
    a, p = members(t, anchor), members(t, "pi")
    return math.fsum(map(kl_term, a, p)) + kl_term(rest(a), rest(p))


Rule = Callable[[Token], tuple[bool, float]]
"""(whether the token is blocked, distance of the deciding number from its threshold)"""


def clip(anchor: str, low: float, high: float, relaxed: Callable[[Token], tuple[bool, bool]] | None = None) -> Rule:
    def rule(t: Token) -> tuple[bool, float]:
        r = divide(t.pi, getattr(t, anchor))
        lift_low, lift_high = relaxed(t) if relaxed else (False, False)
        blocked = (t.advantage > 0 and r > 1 + high and not lift_high) or (
            t.advantage < 0 and r < 1 - low and not lift_low
        )
        # Whether mu = 0.1 is below alpha is a matter of rounding: the policy knows log(mu) only.
        undecided = relaxed is not None and abs(t.mu - 0.1) < 1e-7
        return blocked, 0.0 if undecided else min(abs(r - 1 - high), abs(r - 1 + low))

    return rule


def dppo(divergence: Callable[[Token, str], float], delta: float, anchor: str = "mu") -> Rule:
    def rule(t: Token) -> tuple[bool, float]:
        r, d = divide(t.pi, getattr(t, anchor)), divergence(t, anchor)
        blocked = (t.advantage > 0 and r > 1 and d > delta) or (t.advantage < 0 and r < 1 and d > delta)
        return blocked, min(abs(d - delta), abs(r - 1) if r != 1 else 1.0)

    return rule


def minimal(delta: float, anchor: str = "mu") -> Rule:
    def rule(t: Token) -> tuple[bool, float]:
        drop = getattr(t, anchor) - t.pi
        return t.advantage < 0 and drop >= delta, abs(drop - delta)

    return rule


def ratio(t: Token) -> float:
    return divide(t.pi, t.mu)


def band(low: float, high: float, policy: str) -> Rule:
    """Outside on either side, whatever the advantage."""

    def rule(t: Token) -> tuple[bool, float]:
        r = divide(getattr(t, policy), t.mu)
        return r < low or r > high, min(abs(r - low) if low else 1.0, abs(r - high))

    return rule


def both(first: Rule, second: Rule) -> Rule:
    def rule(t: Token) -> tuple[bool, float]:
        (one, near), (two, close) = first(t), second(t)
        return one or two, min(near, close)

    return rule


def nothing(_: Token) -> tuple[bool, float]:
    return False, 1.0


INF = math.inf
ALGORITHMS: dict[tuple[str, str], tuple[Rule, float]] = {
    ("pg-is", "appendix-d"): (nothing, INF),
    ("cispo", "appendix-d"): (nothing, 3.0),
    ("cispo", "appendix-f"): (nothing, 5.0),
    ("cispo", "appendix-f-lora"): (nothing, 5.0),
    ("grpo-clip-higher", "appendix-d"): (clip("mu", 0.2, 0.28), INF),
    ("grpo-clip-higher", "appendix-f"): (clip("mu", 0.2, 0.27), 5.0),
    ("grpo-clip-higher", "appendix-f-lora"): (clip("mu", 0.2, 0.27), 5.0),
    ("minirl", "appendix-d"): (clip("re", 0.2, 0.28), INF),
    ("minirl-tis", "appendix-d"): (clip("re", 0.2, 0.28), 3.0),
    ("dppo-binary-tv", "appendix-d"): (dppo(binary_tv, 0.15), INF),
    ("dppo-binary-tv", "appendix-f"): (dppo(binary_tv, 0.2), 5.0),
    ("dppo-binary-tv", "appendix-f-lora"): (dppo(binary_tv, 0.15), 5.0),
    ("dppo-binary-kl", "appendix-d"): (dppo(binary_kl, 0.05), INF),
    ("dppo-binary-kl", "appendix-f"): (dppo(binary_kl, 0.05), 5.0),
    ("dppo-binary-kl", "appendix-f-lora"): (dppo(binary_kl, 0.05), 5.0),
    ("dppo-topk-tv", "appendix-d"): (dppo(topk_tv, 0.15), INF),
    ("dppo-topk-tv", "appendix-f"): (dppo(topk_tv, 0.2), 5.0),
    ("dppo-topk-tv", "appendix-f-lora"): (dppo(topk_tv, 0.15), 5.0),
    ("dppo-topk-kl", "appendix-d"): (dppo(topk_kl, 0.05), INF),
    ("dppo-topk-kl", "appendix-f"): (dppo(topk_kl, 0.05), 5.0),
    ("dppo-topk-kl", "appendix-f-lora"): (dppo(topk_kl, 0.05), 5.0),
    ("dppo-binary-tv-decoupled", "appendix-d"): (dppo(binary_tv, 0.15, "re"), INF),
    ("dppo-binary-kl-decoupled", "appendix-d"): (dppo(binary_kl, 0.05, "re"), INF),
    ("dppo-topk-tv-decoupled", "appendix-d"): (dppo(topk_tv, 0.15, "re"), INF),
    ("dppo-topk-kl-decoupled", "appendix-d"): (dppo(topk_kl, 0.05, "re"), INF),
    ("mask-0.5", "section-5.3"): (minimal(0.5), INF),
    ("mask-0.8", "section-5.3"): (minimal(0.8), INF),
    ("mask-0.5-recompute", "section-5.3"): (minimal(0.5, "re"), INF),
    ("relax-low", "section-6"): (clip("mu", 0.2, 0.28, lambda t: (t.mu < 0.1, False)), INF),
    ("relax-high", "section-6"): (clip("mu", 0.2, 0.28, lambda t: (False, t.mu < 0.1)), INF),
    ("relax-both", "section-6"): (clip("mu", 0.2, 0.28, lambda t: (t.mu < 0.1, t.mu < 0.1)), INF),
    ("ppo-clip", "section-4.2"): (clip("mu", 0.2, 0.2), INF),
    ("ppo-dual-clip", "arxiv-1912.09729"): (
        both(clip("mu", 0.2, 0.2), lambda t: (t.advantage < 0 and ratio(t) > 3, abs(ratio(t) - 3))),
        INF,
    ),
    ("token-mis", "verl-rollout-corr"): (band(0, 2, "pi"), INF),
    ("icepop", "arxiv-2512.16144"): (band(0.5, 5, "pi"), INF),
    ("icepop-decoupled", "arxiv-2510.18855"): (both(clip("re", 0.2, 0.28), band(0.5, 5, "re")), INF),
}
SEQUENCE_LEVEL = {"gspo", "sequence-tis", "sequence-mis", "geometric-mis"}


def test_the_reference_covers_every_row_of_the_table() -> None:
    rows = {(n, c) for n in presets.names() for c in presets.constant_sets(n) if n not in SEQUENCE_LEVEL}
    assert rows == set(ALGORITHMS)


@st.composite
def tokens(draw: st.DrawFn) -> Token:
    sampled = st.one_of(
        st.floats(1e-9, 1.0), st.sampled_from([1e-6, 1e-4, 1e-2, 0.05, 0.5, 0.8, 0.99, 1 - 1e-6, 1 - 1e-9, 1.0])
    )
    mu = draw(sampled)
    moved = st.one_of(sampled, st.just(mu), st.floats(0.5, 2.0).map(lambda f: min(1.0, mu * f)), st.just(0.0))
    pi, re = draw(moved), draw(moved)
    inside = draw(st.booleans())
    spread = st.lists(st.floats(0, 1 / K), min_size=K, max_size=K)
    sets = []
    for p in (mu, pi, re):
        others = [v * (1 - p) for v in draw(spread)]
        sets.append(tuple([p, *others[1:]] if inside else others))
    return Token(mu, pi, re, draw(st.sampled_from([1.0, -1.0, 0.75, -0.25, 0.0])), *sets, inside)


def log(p: float) -> float:
    return math.log(p) if p > 0 else -math.inf


def column(rows: list[Token], field: str, dtype: torch.dtype) -> Tensor:
    return torch.tensor([log(getattr(t, field)) for t in rows], dtype=torch.float64).to(dtype)


def table(rows: list[Token], policy: str, dtype: torch.dtype) -> Tensor:
    return torch.tensor([[log(p) for p in t.columns(policy)] for t in rows], dtype=torch.float64).to(dtype)


def check(name: str, constants: str, rows: list[Token], excluded: list[bool], dtype: torch.dtype, near: float) -> None:
    """Compare one microbatch with the reference; rows closer than `near` to a threshold are not comparable."""
    rule, cap = ALGORITHMS[name, constants]
    fields = {"topk": K} if "topk" in name else {}
    preset = presets.get(name, constants=constants, **fields)
    garbage = torch.tensor(excluded)

    def spoiled(values: Tensor) -> Tensor:
        return torch.where(garbage.view(-1, *[1] * (values.ndim - 1)), torch.nan, values)

    logp = spoiled(column(rows, "pi", dtype)).requires_grad_()
    mu_logp = spoiled(column(rows, "mu", dtype))
    recomputed = spoiled(column(rows, "re", dtype)) if preset.needs_recomputed_logp else None
    advantages = spoiled(torch.tensor([t.advantage for t in rows], dtype=dtype))
    divergence = divergence_for(
        preset,
        logp=logp,
        mu_logp=mu_logp,
        recomputed_logp=recomputed,
        topk_logp=spoiled(table(rows, "pi", dtype)),
        mu_topk_logp=spoiled(table(rows, "mu", dtype)),
        recomputed_topk_logp=spoiled(table(rows, "re", dtype)),
        topk_member=torch.tensor([t.member for t in rows]),
    )
    loss = policy_loss(
        preset,
        logp,
        mu_logp,
        advantages,
        loss_mask=~garbage,
        divergence=divergence,
        recomputed_logp=recomputed,
    )
    upstream = torch.arange(1, len(rows) + 1, dtype=dtype)
    (gradient,) = torch.autograd.grad(loss.per_token, logp, upstream)
    assert loss.per_token.dtype == dtype
    tolerance = 1e-11 if dtype == torch.float64 else 2e-5
    for i, token in enumerate(rows):
        if excluded[i]:
            assert loss.per_token[i].item() == 0
            assert gradient[i].item() == 0
            assert not loss.mask[i]
            continue
        blocked, distance = rule(token)
        if distance < near:
            continue
        assert loss.mask[i].item() is not blocked, token
        if blocked:
            assert loss.per_token[i].item() == 0
            assert gradient[i].item() == 0
            continue
        expected = -min(divide(token.pi, token.mu), cap) * token.advantage
        assert loss.per_token[i].item() == pytest.approx(expected, rel=tolerance, abs=1e-30)
        assert gradient[i].item() == pytest.approx(expected * (i + 1), rel=tolerance, abs=1e-30)


@pytest.mark.parametrize(("name", "constants"), list(ALGORITHMS))
@settings(max_examples=25)
@given(data=st.data())
def test_preset_matches_its_formula(name: str, constants: str, data: st.DataObject) -> None:
    rows = data.draw(st.lists(tokens(), min_size=1, max_size=12))
    excluded = data.draw(st.lists(st.sampled_from([False, False, True]), min_size=len(rows), max_size=len(rows)))
    check(name, constants, rows, excluded, torch.float64, near=1e-9)
    # float32 moves a near-certain probability by up to 6e-8, and its complement and the KL by more.
    check(name, constants, rows, excluded, torch.float32, near=1e-2)


@pytest.mark.parametrize("name", ["relax-low", "relax-high", "relax-both"])
@pytest.mark.parametrize(("mu", "lifted"), [(0.0999, True), (0.1001, False)])
def test_the_clip_is_lifted_below_alpha_only(name: str, mu: float, lifted: bool) -> None:
    """Close to alpha = 0.1 on either side, at ratios far outside the clip in the direction of the advantage."""
    low, high = policy_loss(
        presets.get(name),
        torch.tensor([mu / 2, mu * 2]).log(),
        torch.tensor([mu, mu]).log(),
        torch.tensor([-1.0, 1.0]),
        loss_mask=torch.tensor([True, True]),
    ).mask.tolist()
    assert low is (lifted and name != "relax-high")
    assert high is (lifted and name != "relax-low")


@pytest.mark.parametrize("advantage", [1.0, -1.0, -0.3])
def test_the_gradient_of_dual_clip_is_that_of_its_objective(advantage: float) -> None:
    """max(min(r A, clip(r) A), c A) for A < 0, the inner minimum otherwise (arXiv 1912.09729, Eq. 5), by autograd."""
    mu = torch.full((60,), 0.2, dtype=torch.float64).log()
    logp = (mu + torch.linspace(-1.5, 1.5, 60, dtype=torch.float64)).requires_grad_()
    r = (logp - mu).exp()
    objective = torch.minimum(r * advantage, r.clamp(0.8, 1.2) * advantage)
    if advantage < 0:
        objective = torch.maximum(objective, torch.full_like(r, 3.0 * advantage))
    (expected,) = torch.autograd.grad(-objective.sum(), logp)
    own = logp.detach().requires_grad_()
    loss = policy_loss(
        presets.get("ppo-dual-clip"), own, mu, torch.full_like(mu, advantage), loss_mask=torch.ones(60).bool()
    )
    (gradient,) = torch.autograd.grad(loss.per_token.sum(), own)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=0)
    assert 0 < (gradient == 0).sum() < 60


def test_the_gradient_of_icepop_is_that_of_its_objective() -> None:
    """M(k) A with k = pi / mu, M(k) = k inside [0.5, 5] and 0 outside (arXiv 2512.16144, Eq. 1), by autograd."""
    mu = torch.full((50,), 0.1, dtype=torch.float64).log()
    logp = (mu + torch.linspace(-2, 2.2, 50, dtype=torch.float64)).requires_grad_()
    k = (logp - mu).exp()
    inside = (k >= 0.5) & (k <= 5)
    (expected,) = torch.autograd.grad(-(torch.where(inside, k, 0.0) * -0.7).sum(), logp)
    own = logp.detach().requires_grad_()
    loss = policy_loss(presets.get("icepop"), own, mu, torch.full_like(mu, -0.7), loss_mask=torch.ones(50).bool())
    (gradient,) = torch.autograd.grad(loss.per_token.sum(), own)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=0)
    assert 0 < (gradient == 0).sum() < 50
