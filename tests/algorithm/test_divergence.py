"""Divergences against scalar float64 references written from Eqs. 13-16, and the orderings of Appendix C."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_dppo.algorithm.divergence import (
    COMPLEMENT_FLOOR,
    binary_kl,
    binary_tv,
    topk_kl,
    topk_tv,
)
from megatron_dppo.algorithm.trust_region import divergence_mask

FLOOR_ERROR = 2e-6


def log(p: float) -> float:
    return math.log(p) if p > 0 else -math.inf


def kl_term(mu: float, pi: float) -> float:
    if mu == 0:
        return 0.0
    return math.inf if pi == 0 else mu * (math.log(mu) - math.log(pi))


def exact_tv(mu: Tensor, pi: Tensor) -> float:
    """1/2 sum over the whole vocabulary of |mu - pi| (Section 2.2), from log-probabilities."""
    return 0.5 * math.fsum(abs(a - b) for a, b in zip(mu.exp().tolist(), pi.exp().tolist(), strict=True))


def exact_kl(mu: Tensor, pi: Tensor) -> float:
    """Sum over the whole vocabulary of mu log(mu / pi), in nats."""
    pairs = zip(mu.tolist(), pi.tolist(), strict=True)
    return max(math.fsum(math.exp(a) * (a - b) for a, b in pairs if a > -math.inf), 0.0)


def reference_kl(mu: list[float], pi: list[float]) -> float:
    """KL over listed tokens and the floored rest."""
    rest_mu, rest_pi = max(1 - math.fsum(mu), 1e-6), max(1 - math.fsum(pi), 1e-6)
    return max(math.fsum(map(kl_term, mu, pi)) + kl_term(rest_mu, rest_pi), 0.0)


def reference_tv(mu: list[float], pi: list[float], *, other: bool = True) -> float:
    rest_mu, rest_pi = max(1 - math.fsum(mu), 1e-6), max(1 - math.fsum(pi), 1e-6)
    terms = [abs(m - p) for m, p in zip(mu, pi, strict=True)] + ([abs(rest_mu - rest_pi)] if other else [])
    return min(0.5 * math.fsum(terms), 1.0)


def logs(values: list[float]) -> Tensor:
    return torch.tensor([log(v) for v in values], dtype=torch.float64)


probability = st.one_of(
    st.floats(0, 1), st.sampled_from([0.0, 1e-300, 1e-30, 1e-7, 1e-6, 0.5, 1 - 1e-6, 1 - 1e-7, 1 - 1e-12, 1.0])
)


@st.composite
def distribution_pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Two normalised log-probability rows over one vocabulary; from nearly equal to hundreds of nats apart."""
    vocab = draw(st.integers(2, 9))
    scale = draw(st.sampled_from([0.1, 1.0, 5.0, 30.0, 200.0]))
    logits = st.lists(st.floats(-1, 1), min_size=vocab, max_size=vocab)
    pair = [torch.tensor(draw(logits), dtype=torch.float64) * scale for _ in range(2)]
    return torch.log_softmax(pair[0], -1), torch.log_softmax(pair[1], -1)


@given(st.lists(st.tuples(probability, probability), min_size=1, max_size=20))
def test_binary_matches_reference(pairs: list[tuple[float, float]]) -> None:
    mu, pi = logs([m for m, _ in pairs]), logs([p for _, p in pairs])
    tv, kl = binary_tv(mu, pi), binary_kl(mu, pi)
    assert tv.dtype == kl.dtype == torch.float64
    for i, (m, p) in enumerate(pairs):
        assert tv[i].item() == pytest.approx(abs(m - p), abs=1e-15)
        # 1 - p of the reference itself carries 1e-16 of rounding, which the floor keeps below 1e-10 relative.
        assert kl[i].item() == pytest.approx(reference_kl([m], [p]), rel=1e-9, abs=1e-12)


@given(st.data())
def test_topk_matches_reference(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    share = st.floats(0, 1 / columns)
    table = [
        [[data.draw(st.one_of(share, st.just(0.0))) for _ in range(columns)] for _ in range(rows)] for _ in range(2)
    ]
    member = [[data.draw(st.booleans()) for _ in range(columns)] for _ in range(rows)]
    flags = torch.tensor(member)
    garbage = data.draw(st.sampled_from([math.nan, math.inf, -math.inf, 7.0]))
    mu, pi = (torch.stack([logs(row) for row in policy]).where(flags, garbage) for policy in table)
    tv, literal, kl = topk_tv(mu, pi, flags), topk_tv(mu, pi, flags, include_other=False), topk_kl(mu, pi, flags)
    for i in range(rows):
        m = [v for v, counts in zip(table[0][i], member[i], strict=True) if counts]
        p = [v for v, counts in zip(table[1][i], member[i], strict=True) if counts]
        assert tv[i].item() == pytest.approx(reference_tv(m, p), abs=1e-14)
        assert literal[i].item() == pytest.approx(reference_tv(m, p, other=False), abs=1e-14)
        assert kl[i].item() == pytest.approx(reference_kl(m, p), rel=1e-9, abs=1e-12)


@settings(max_examples=400)
@given(distribution_pairs(), st.data())
def test_lower_bounds_are_nested(pair: tuple[Tensor, Tensor], data: st.DataObject) -> None:
    """Appendix C: binary <= top-K <= a larger top-K <= exact; Pinsker; TV in [0, 1]; KL >= 0."""
    mu, pi = pair
    vocab = mu.numel()
    order = data.draw(st.permutations(range(vocab)))
    small, large = sorted(data.draw(st.tuples(st.integers(1, vocab), st.integers(1, vocab))))
    everything = torch.ones(vocab, dtype=torch.bool)
    mu, pi = mu[list(order)], pi[list(order)]  # the sampled token is the first

    tv = [binary_tv(mu[0], pi[0])]
    kl = [binary_kl(mu[0], pi[0])]
    for size in (small, large):
        tv.append(topk_tv(mu[:size], pi[:size], everything[:size]))
        kl.append(topk_kl(mu[:size], pi[:size], everything[:size]))
    tv.append(torch.tensor(exact_tv(mu, pi), dtype=torch.float64))
    kl.append(torch.tensor(exact_kl(mu, pi), dtype=torch.float64))

    for lower, upper in pairwise(tv):
        assert lower <= upper + FLOOR_ERROR
    for bound in kl:
        assert bound <= kl[-1] + FLOOR_ERROR
    # Between two bounds that each floor a complement, the order is exact only where the floor is idle: a floored
    # "other" under pi hides KL that a coarser partition still sees. Both stay below the exact KL, as asserted above.
    if all(1 - policy[:large].exp().sum() >= COMPLEMENT_FLOOR for policy in (mu, pi)):
        for lower, upper in pairwise(kl):
            assert lower <= upper + FLOOR_ERROR
    for distance, divergence in zip(tv, kl, strict=True):
        assert 0 <= distance <= 1
        assert divergence >= 0
        assert distance**2 <= divergence / 2 + FLOOR_ERROR


@given(distribution_pairs(), st.data())
def test_permutation_invariance(pair: tuple[Tensor, Tensor], data: st.DataObject) -> None:
    mu, pi = pair
    vocab = mu.numel()
    order = list(data.draw(st.permutations(range(vocab))))
    member = torch.tensor(data.draw(st.lists(st.booleans(), min_size=vocab, max_size=vocab)))
    for measure in (topk_tv, topk_kl):
        torch.testing.assert_close(
            measure(mu, pi, member), measure(mu[order], pi[order], member[order]), rtol=1e-12, atol=1e-12
        )


@given(distribution_pairs())
def test_equal_policies_do_not_diverge(pair: tuple[Tensor, Tensor]) -> None:
    mu, _ = pair
    member = torch.ones_like(mu, dtype=torch.bool)
    for value in (binary_tv(mu, mu), binary_kl(mu, mu), topk_tv(mu, mu, member), topk_kl(mu, mu, member)):
        assert (value == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_is_computed_in_float64(dtype: torch.dtype) -> None:
    mu = torch.tensor([-0.0001, -3.0], dtype=dtype, requires_grad=True)
    pi = torch.tensor([-0.002, -2.5], dtype=dtype, requires_grad=True)
    for measure in (binary_tv, binary_kl):
        value = measure(mu, pi)
        assert value.dtype == torch.float64
        assert not value.requires_grad
        assert torch.equal(value, measure(mu.double(), pi.double()))


def test_impossible_tokens() -> None:
    """-inf never becomes NaN; +inf only where a member has pi = 0 < mu."""
    impossible, half = torch.tensor([-math.inf]), torch.tensor([math.log(0.5)])
    cases = [(impossible, impossible, 0.0), (half, impossible, math.inf)]
    for mu, pi, expected in cases:
        assert binary_kl(mu, pi).item() == expected
        assert topk_kl(mu[:, None], pi[:, None], torch.ones(1, 1, dtype=torch.bool)).item() == expected
        assert not binary_tv(mu, pi).isnan().any()
    assert binary_kl(impossible, half).item() == pytest.approx(math.log(2))
    certain = torch.tensor([0.0])
    assert math.isfinite(binary_kl(impossible, certain).item())
    assert binary_kl(certain, impossible).item() == math.inf


def test_complements_are_floored_on_both_sides() -> None:
    """A policy that is certain leaves 1e-6 to everything else, whether it is mu or pi, binary or top-K."""
    certain, half = torch.tensor([0.0]), torch.tensor([0.5]).double().log()
    member = torch.ones(1, 1, dtype=torch.bool)
    towards = 0.5 * math.log(0.5) + 0.5 * math.log(0.5 / 1e-6)
    away = math.log(2) + 1e-6 * math.log(1e-6 / 0.5)
    for mu, pi, expected in ((half, certain, towards), (certain, half, away)):
        assert binary_kl(mu, pi).item() == pytest.approx(expected, rel=1e-12)
        assert topk_kl(mu[:, None], pi[:, None], member).item() == pytest.approx(expected, rel=1e-12)
        assert topk_tv(mu[:, None], pi[:, None], member).item() == pytest.approx(0.5 - 0.5e-6, rel=1e-12)
        assert binary_tv(mu, pi).item() == pytest.approx(0.5, rel=1e-15)


def test_masses_slightly_over_one() -> None:
    """Rounded engine log-probabilities may sum to more than 1, one of them may exceed 0."""
    mu = torch.tensor([[math.log(0.7) + 1e-4, math.log(0.3) + 1e-4]])
    pi = torch.tensor([[math.log(0.7), math.log(0.3)]])
    member = torch.ones(1, 2, dtype=torch.bool)
    for value in (topk_tv(mu, pi, member), topk_kl(mu, pi, member), topk_tv(pi, mu, member), topk_kl(pi, mu, member)):
        assert 0 <= value.item() < 2e-4
    above, certain = torch.tensor([1e-6]), torch.tensor([0.0])
    assert binary_tv(above, certain).item() == 0
    assert binary_kl(above, certain).item() == 0


def test_only_the_sampled_token_is_the_binary_divergence() -> None:
    mu, pi = torch.tensor([-0.3, -2.0]).double(), torch.tensor([-0.9, -1.0]).double()
    member = torch.ones(2, 1, dtype=torch.bool)
    torch.testing.assert_close(topk_tv(mu[:, None], pi[:, None], member), binary_tv(mu, pi), rtol=1e-14, atol=0)
    torch.testing.assert_close(topk_kl(mu[:, None], pi[:, None], member), binary_kl(mu, pi), rtol=1e-12, atol=0)


def test_no_rows() -> None:
    empty = torch.zeros(0)
    table, member = torch.zeros(0, 21), torch.zeros(0, 21, dtype=torch.bool)
    for value in (binary_tv(empty, empty), binary_kl(empty, empty), topk_tv(table, table, member)):
        assert value.shape == (0,)


def test_bad_topk_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"mu_logp \(3, 4\), pi_logp \(3, 5\)"):
        topk_tv(torch.zeros(3, 4), torch.zeros(3, 5), torch.ones(3, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="member must be boolean"):
        topk_kl(torch.zeros(3, 4), torch.zeros(3, 4), torch.ones(3, 4))


def unfloored(mu: Tensor, pi: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
    """TV and KL over the tokens `inside` and the rest, whose mass is summed directly: exact, no 1 - p anywhere."""

    def buckets(logp: Tensor) -> Tensor:
        rest = torch.logsumexp(torch.where(inside, -torch.inf, logp), -1, keepdim=True)
        return torch.cat([torch.where(inside, logp, -torch.inf), rest], -1)

    mu, pi = buckets(mu), buckets(pi)
    tv = 0.5 * (mu.exp() - pi.exp()).abs().sum(-1)
    return tv, torch.where(mu > -torch.inf, mu.exp() * (mu - pi), 0.0).sum(-1)


def test_near_certain_tokens_in_float32_are_masked_as_in_exact_arithmetic() -> None:
    """4,000 tokens with 1 - mu from about 1e-10 to 1e-2; 3,000 moved a little, 1,000 lost up to all of their mass.

    The truth is the unfloored divergence of the float64 distributions; what the mask sees are float32 log-softmax
    outputs, many of which are exactly 0, often for one policy only.
    """
    generator = torch.Generator().manual_seed(0)
    tokens, healthy, vocab = 4000, 3000, 32
    margin = torch.empty(tokens, dtype=torch.float64).uniform_(11, 26, generator=generator)
    logits = torch.randn(tokens, vocab, generator=generator, dtype=torch.float64)
    logits[:, 0] += margin
    moved = logits + 0.5 * torch.randn(tokens, vocab, generator=generator, dtype=torch.float64)
    moved[healthy:, 0] -= 2 * margin[healthy:] * torch.rand(tokens - healthy, generator=generator, dtype=torch.float64)
    exact_mu, exact_pi = torch.log_softmax(logits, -1), torch.log_softmax(moved, -1)
    mu, pi = torch.log_softmax(logits.float(), -1), torch.log_softmax(moved.float(), -1)
    one_sided = (mu[:healthy, 0] == 0) != (pi[:healthy, 0] == 0)
    assert one_sided.sum() > 50  # these break an unfloored complement: log(x / 0)

    columns = torch.cat([torch.topk(mu, 20).indices, torch.zeros(tokens, 1, dtype=torch.int64)], -1)
    member = torch.ones(tokens, 21, dtype=torch.bool)
    member[:, -1] = (columns[:, :20] != 0).all(-1)
    topk_args = mu.gather(1, columns), pi.gather(1, columns), member
    sampled = torch.zeros(tokens, vocab, dtype=torch.bool)
    sampled[:, 0] = True
    in_set = sampled.scatter(1, columns, True)

    ratio, exact_ratio = (pi[:, 0].double() - mu[:, 0].double()).exp(), (exact_pi - exact_mu)[:, 0].exp()
    (true_tv, true_kl), (true_topk_tv, true_topk_kl) = (
        unfloored(exact_mu, exact_pi, inside) for inside in (sampled, in_set)
    )
    measured = {
        "binary-tv": (binary_tv(mu[:, 0], pi[:, 0]), true_tv, 0.15),
        "binary-kl": (binary_kl(mu[:, 0], pi[:, 0]), true_kl, 0.05),
        "topk-tv": (topk_tv(*topk_args), true_topk_tv, 0.15),
        "topk-kl": (topk_kl(*topk_args), true_topk_kl, 0.05),
    }
    for name, (divergence, truth, delta) in measured.items():
        thresholds = {"delta_negative": delta, "delta_positive": delta}
        for sign in (1.0, -1.0):
            advantage = torch.full((tokens,), sign)
            keep = divergence_mask(ratio, divergence, advantage, **thresholds)
            expected = divergence_mask(exact_ratio, truth, advantage, **thresholds)
            assert keep[:healthy].all(), f"{name} masked {(~keep[:healthy]).sum()} healthy tokens"
            assert torch.equal(keep, expected), f"{name}: {(keep != expected).sum()} tokens masked wrongly"
            assert (sign > 0) or 100 < (~keep).sum() < 1000
