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
        return blocked, min(abs(r - 1 - high), abs(r - 1 + low))

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
}
SEQUENCE_LEVEL = {"gspo"}


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


def simple(name: str, mu: list[float], pi: list[float], advantage: list[float], **overrides: object):
    preset = presets.get(name, **overrides)
    logp = torch.tensor([log(p) for p in pi], dtype=torch.float64, requires_grad=True)
    mu_logp = torch.tensor([log(p) for p in mu], dtype=torch.float64)
    loss = policy_loss(
        preset,
        logp,
        mu_logp,
        torch.tensor(advantage, dtype=torch.float64),
        loss_mask=torch.ones(len(mu), dtype=torch.bool),
        divergence=divergence_for(preset, logp=logp, mu_logp=mu_logp),
    )
    (gradient,) = torch.autograd.grad(loss.per_token.sum(), logp)
    return loss, gradient


def test_ties_at_the_threshold() -> None:
    """Numbers that float64 represents exactly: a tie is kept everywhere, and blocked by the minimal mask."""
    tie = {"mu": [1.0], "pi": [0.5], "advantage": [-1.0]}
    assert simple("dppo-binary-tv", threshold_negative=0.5, **tie)[0].mask.item() is True
    assert simple("dppo-binary-tv", threshold_negative=0.499, **tie)[0].mask.item() is False
    assert simple("ppo-clip", threshold_negative=0.5, **tie)[0].mask.item() is True
    assert simple("mask-0.5", **tie)[0].mask.item() is False
    up = {"mu": [0.5], "pi": [1.0], "advantage": [1.0]}
    assert simple("ppo-clip", threshold_positive=1.0, **up)[0].mask.item() is True
    assert simple("ppo-clip", threshold_positive=0.999, **up)[0].mask.item() is False
    assert simple("relax-low", relax_below=0.5, threshold_positive=0.1, **up)[0].mask.item() is False


@pytest.mark.parametrize("constants", ["appendix-d", "appendix-f"])
def test_section_4_2_numbers_end_to_end(constants: str) -> None:
    """PPO clips 1e-4 -> 1e-2 and keeps 0.99 -> 0.80; DPPO-TV at delta = 0.15 does the reverse."""
    numbers = {"mu": [1e-4, 0.99], "pi": [1e-2, 0.80], "advantage": [1.0, -1.0]}
    ppo, ppo_gradient = simple("ppo-clip", **numbers)
    dppo_loss, gradient = simple(
        "dppo-binary-tv", constants=constants, threshold_negative=0.15, threshold_positive=0.15, **numbers
    )
    assert ppo.mask.tolist() == [False, True]
    assert dppo_loss.mask.tolist() == [True, False]
    cap = math.inf if constants == "appendix-d" else 5.0
    assert gradient.tolist() == pytest.approx([-min(100.0, cap), 0.0])
    assert ppo_gradient.tolist() == pytest.approx([0.0, 0.80 / 0.99])


def test_equal_policies_give_the_plain_policy_gradient() -> None:
    for name in ("pg-is", "cispo", "grpo-clip-higher", "dppo-binary-tv", "dppo-binary-kl", "mask-0.5", "relax-both"):
        loss, gradient = simple(name, [0.3, 1.0, 1e-8], [0.3, 1.0, 1e-8], [1.0, -2.0, 0.5])
        assert loss.mask.all()
        assert gradient.tolist() == [-1.0, 2.0, -0.5]
        assert loss.per_token.tolist() == [-1.0, 2.0, -0.5]


def test_blocked_rows_contribute_exactly_zero_even_where_the_ratio_is_infinite() -> None:
    loss, gradient = simple("dppo-binary-tv", [0.0, 1.0, 0.5], [0.9, 0.0, 0.5], [1.0, -1.0, 1.0])
    assert loss.ratio[0].item() == math.inf
    assert loss.mask.tolist() == [False, False, True]
    assert loss.per_token.tolist() == [0.0, 0.0, -1.0]
    assert gradient.tolist() == [0.0, 0.0, -1.0]


def test_zero_advantage_and_impossible_tokens_contribute_exactly_zero() -> None:
    loss, gradient = simple("pg-is", [0.0, 0.5, 0.0], [0.5, 0.0, 0.0], [0.0, 1.0, 0.0])
    assert loss.per_token.tolist() == [0.0, 0.0, 0.0]
    assert gradient.tolist() == [0.0, 0.0, 0.0]


def test_an_active_row_that_is_not_finite_stays_visible() -> None:
    loss, _ = simple("pg-is", [0.0, 0.5], [0.5, 0.5], [1.0, math.nan])
    assert not loss.per_token.isfinite().any()


@pytest.mark.parametrize("rows", [0, 3])
def test_nothing_to_train_still_has_a_graph(rows: int) -> None:
    logp = torch.full((rows,), math.nan, requires_grad=True)
    loss = policy_loss(
        presets.get("pg-is"), logp, logp.detach(), logp.detach(), loss_mask=torch.zeros(rows, dtype=torch.bool)
    )
    loss.per_token.sum().backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == [0.0] * rows
    assert loss.metrics.finalize(1) == {"tokens": 0.0}


def test_gradient_flows_through_logp_only() -> None:
    leaves = {n: torch.tensor([-0.5, -1.0], requires_grad=True) for n in ("logp", "mu", "re", "advantages", "entropy")}
    preset = presets.get("dppo-binary-kl-decoupled")
    divergence = divergence_for(preset, logp=leaves["logp"], mu_logp=leaves["mu"], recomputed_logp=leaves["re"])
    loss = policy_loss(
        preset,
        leaves["logp"],
        leaves["mu"],
        leaves["advantages"],
        loss_mask=torch.ones(2),
        divergence=divergence,
        recomputed_logp=leaves["re"],
        entropy=leaves["entropy"],
    )
    loss.per_token.sum().backward()
    assert [n for n, leaf in leaves.items() if leaf.grad is not None] == ["logp"]
    assert not loss.ratio.requires_grad
    assert not loss.metrics.sums.requires_grad


def test_entropy_bonus_reaches_every_trained_row_blocked_or_not() -> None:
    preset = presets.get("dppo-binary-tv", entropy_coefficient=0.01)
    logp = torch.tensor([-0.01, -3.0, -1.0], requires_grad=True)
    mu = torch.tensor([-3.0, -3.0, -1.0])
    entropy = torch.tensor([2.0, 1.0, math.nan], requires_grad=True)
    loss = policy_loss(
        preset,
        logp,
        mu,
        torch.ones(3),
        loss_mask=torch.tensor([True, True, False]),
        divergence=divergence_for(preset, logp=logp, mu_logp=mu),
        entropy=entropy,
    )
    assert loss.mask.tolist() == [False, True, False]
    loss.per_token.sum().backward()
    torch.testing.assert_close(loss.per_token.detach(), torch.tensor([-0.02, -1.01, 0.0]))
    torch.testing.assert_close(entropy.grad, torch.tensor([-0.01, -0.01, 0.0]))
    torch.testing.assert_close(logp.grad, torch.tensor([0.0, -1.0, 0.0]))


def test_decoupled_direction_comes_from_the_recomputed_policy() -> None:
    """pi is above mu but below pi': for A < 0 the update moves away from pi', so only the decoupled row blocks it."""
    args = {
        "logp": torch.tensor([math.log(0.5)]),
        "mu_logp": torch.tensor([math.log(0.3)]),
        "recomputed_logp": torch.tensor([math.log(0.9)]),
    }
    for name, kept in (("dppo-binary-tv", True), ("dppo-binary-tv-decoupled", False)):
        preset = presets.get(name)
        if not preset.needs_recomputed_logp:
            args = {k: v for k, v in args.items() if k != "recomputed_logp"} | {"recomputed_logp": None}
        else:
            args["recomputed_logp"] = torch.tensor([math.log(0.9)])
        loss = policy_loss(
            preset,
            args["logp"],
            args["mu_logp"],
            torch.tensor([-1.0]),
            loss_mask=torch.tensor([True]),
            divergence=divergence_for(preset, **args),
            recomputed_logp=args["recomputed_logp"],
        )
        assert loss.mask.item() is kept
        # The importance ratio of Eq. 23 is to mu in both.
        assert loss.ratio.item() == pytest.approx(0.5 / 0.3)


def test_gspo_uses_the_geometric_mean_ratio_of_the_sequence() -> None:
    preset = presets.get("gspo", threshold_negative=0.2, threshold_positive=0.2)
    logp = torch.tensor([-1.0, -2.0, -0.5, -1.0, math.nan], dtype=torch.float64, requires_grad=True)
    mu = torch.tensor([-1.1, -2.1, -1.0, -1.5, math.nan], dtype=torch.float64)
    loss = policy_loss(
        preset,
        logp,
        mu,
        torch.ones(5, dtype=torch.float64),
        loss_mask=torch.tensor([True, True, True, True, False]),
        sequence_ids=torch.tensor([0, 0, 1, 1, -1]),
    )
    ratio = [math.exp(0.1)] * 2 + [math.exp(0.5)] * 2
    assert loss.ratio.tolist() == pytest.approx([*ratio, 1.0])
    assert loss.mask.tolist() == [True, True, False, False, False]
    (gradient,) = torch.autograd.grad(loss.per_token.sum(), logp)
    assert gradient.tolist() == pytest.approx([-math.exp(0.1)] * 2 + [0.0] * 3)


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.floats(-4, 0), st.floats(-0.002, 0.002), st.booleans()), min_size=1, max_size=15
    )
)
def test_gspo_matches_its_formula(rows: list[tuple[int, float, float, bool]]) -> None:
    """s_i = exp(mean_t log r_t) is both the clipped ratio, at 1 - 3e-4 and 1 + 4e-4, and the weight of the gradient."""
    advantage = [1.0, -1.0, 0.5, -0.5]
    mean = {
        s: math.fsum(step for i, _, step, on in rows if on and i == s) / max(sum(on for i, *_, on in rows if i == s), 1)
        for s in range(4)
    }
    mu = torch.tensor([m if on else math.nan for _, m, _, on in rows], dtype=torch.float64)
    logp = (mu + torch.tensor([step for _, _, step, _ in rows], dtype=torch.float64)).requires_grad_()
    loss = policy_loss(
        presets.get("gspo"),
        logp,
        mu,
        torch.tensor([advantage[s] for s, *_ in rows], dtype=torch.float64),
        loss_mask=torch.tensor([on for *_, on in rows]),
        sequence_ids=torch.tensor([s if on else -1 for s, _, _, on in rows]),
    )
    (gradient,) = torch.autograd.grad(loss.per_token.sum(), logp)
    for i, (s, _, _, on) in enumerate(rows):
        ratio = math.exp(mean[s])
        blocked = ratio > 1 + 4e-4 if advantage[s] > 0 else ratio < 1 - 3e-4
        if on and min(abs(ratio - 1 - 4e-4), abs(ratio - 1 + 3e-4)) < 1e-9:
            continue
        assert loss.mask[i].item() is (on and not blocked)
        expected = -ratio * advantage[s] if on and not blocked else 0.0
        assert loss.per_token[i].item() == pytest.approx(expected, rel=1e-11)
        assert gradient[i].item() == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize(
    ("name", "missing", "given", "message"),
    [
        ("minirl", "recomputed_logp", {}, "recomputed_logp is missing: run the trainer's forward"),
        ("dppo-binary-tv", "divergence", {}, "divergence is missing"),
        ("gspo", "sequence_ids", {}, "sequence_ids is missing"),
        ("pg-is", "", {"recomputed_logp": torch.zeros(2)}, "recomputed_logp would have no effect"),
        ("pg-is", "", {"divergence": torch.zeros(2)}, "does not mask by divergence"),
        ("pg-is", "", {"entropy": torch.zeros(3)}, r"entropy has shape \(3,\), logp \(2,\)"),
        ("pg-is", "", {"mu_logp": torch.zeros(2, 1)}, r"mu_logp has shape \(2, 1\)"),
    ],
)
def test_inputs_that_do_not_fit_the_preset_are_refused(
    name: str, missing: str, given: dict[str, Tensor], message: str
) -> None:
    arguments = {"mu_logp": torch.zeros(2), "advantages": torch.ones(2)} | given
    with pytest.raises(ValueError, match=message):
        policy_loss(
            presets.get(name), torch.zeros(2), arguments.pop("mu_logp"), arguments.pop("advantages"),
            loss_mask=torch.ones(2, dtype=torch.bool), **arguments,
        )  # fmt: skip


def test_entropy_bonus_without_entropy_is_refused() -> None:
    with pytest.raises(ValueError, match="entropy is missing"):
        policy_loss(
            presets.get("pg-is", entropy_coefficient=0.1),
            torch.zeros(2),
            torch.zeros(2),
            torch.zeros(2),
            loss_mask=torch.ones(2),
        )


def test_divergence_for_names_what_is_missing() -> None:
    logp = torch.zeros(2)
    assert divergence_for(presets.get("minirl"), logp=logp, mu_logp=logp) is None
    with pytest.raises(ValueError, match="needs recomputed_logp"):
        divergence_for(presets.get("dppo-binary-tv-decoupled"), logp=logp, mu_logp=logp)
    with pytest.raises(ValueError, match="needs mu_topk_logp"):
        divergence_for(presets.get("dppo-topk-tv"), logp=logp, mu_logp=logp)
    with pytest.raises(ValueError, match="needs recomputed_topk_logp"):
        divergence_for(presets.get("dppo-topk-kl-decoupled"), logp=logp, mu_logp=logp, mu_topk_logp=logp)
    columns, member = torch.zeros(2, 20), torch.ones(2, 20, dtype=torch.bool)
    with pytest.raises(ValueError, match="need 21 columns"):
        divergence_for(
            presets.get("dppo-topk-tv"), logp=logp, mu_logp=logp,
            topk_logp=columns, mu_topk_logp=columns, topk_member=member,
        )  # fmt: skip
