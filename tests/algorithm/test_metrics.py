"""Metrics against direct computation, and merged exactly however a batch is split."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_dppo.algorithm import (
    TokenMetrics,
    divergence_for,
    masked_token_counts,
    most_masked_tokens,
    policy_loss,
    presets,
)
from megatron_dppo.algorithm.objective import PolicyLoss


class Rows:
    """A random flat batch with garbage outside the loss mask."""

    def __init__(self, size: int, seed: int, spread: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.mask = torch.rand(size, generator=generator) < 0.8
        logp = -3 * torch.rand(size, generator=generator, dtype=torch.float64)
        moved = (logp + spread * torch.randn(size, generator=generator, dtype=torch.float64)).clamp(max=0)
        self.mu, self.pi = self.spoiled(logp), self.spoiled(moved)
        self.advantages = self.spoiled(torch.randint(-1, 2, (size,), generator=generator).double() / 2)
        self.entropy = self.spoiled(torch.rand(size, generator=generator, dtype=torch.float64))
        self.returns = self.spoiled(torch.randint(0, 2, (size,), generator=generator).double())
        self.ids = torch.randint(0, 10, (size,), generator=generator)

    def spoiled(self, values: Tensor) -> Tensor:
        return torch.where(self.mask, values, torch.nan)

    def loss(self, rows: Tensor | slice = slice(None), name: str = "dppo-binary-tv") -> PolicyLoss:
        preset = presets.get(name)
        pi, mu = self.pi[rows], self.mu[rows]
        return policy_loss(
            preset,
            pi,
            mu,
            self.advantages[rows],
            loss_mask=self.mask[rows],
            divergence=divergence_for(preset, logp=pi, mu_logp=mu),
            entropy=self.entropy[rows],
            returns=self.returns[rows],
        )


def test_metrics_are_what_their_names_say() -> None:
    rows = Rows(500, seed=0)
    got = rows.loss().metrics.finalize(sequences=20)
    keep = rows.mask
    mu, pi, a = rows.mu[keep], rows.pi[keep], rows.advantages[keep]
    ratio, difference = (pi - mu).exp(), (pi.exp() - mu.exp()).abs()
    blocked = (difference > 0.2) & (((a > 0) & (ratio > 1)) | ((a < 0) & (ratio < 1)))
    n = len(mu)
    expected = {
        "tokens": n,
        "abs_prob_diff_mean": difference.mean(),
        "abs_prob_diff_max": difference.max(),
        "divergence_mean": difference.mean(),
        "divergence_max": difference.max(),
        "masked_fraction": blocked.double().mean(),
        "masked_fraction_positive": blocked[a > 0].double().mean(),
        "masked_fraction_negative": blocked[a < 0].double().mean(),
        "truncated_fraction": ((ratio > 5) & ~blocked).double().mean(),
        "bad_update_fraction": ((a < 0) & (mu.exp() - pi.exp() >= 0.5)).double().mean(),
        "ratio_mean": ratio.mean(),
        "ratio_min": ratio.min(),
        "ratio_max": ratio.max(),
        "entropy_mean": rows.entropy[keep].mean(),
        "masked_mu_positive": mu.exp()[blocked & (a > 0)].mean(),
        "masked_mu_negative": mu.exp()[blocked & (a < 0)].mean(),
        "masked_entropy_positive": rows.entropy[keep][blocked & (a > 0)].mean(),
        "masked_entropy_negative": rows.entropy[keep][blocked & (a < 0)].mean(),
        "surrogate": (rows.returns[keep] * (ratio - 1)).sum() / 20,
        "linear_penalty_estimate": 2 * 1.0 * (ratio - 1).abs().sum() / 20,
    }
    quantiles = {k: v for k, v in got.items() if k.startswith("ratio_p")}
    assert set(got) - set(quantiles) == set(expected)
    for name, value in expected.items():
        assert got[name] == pytest.approx(float(value), rel=1e-12), name
    assert min(got["masked_fraction_positive"], got["masked_fraction_negative"], got["bad_update_fraction"]) > 0


def test_mismatch_by_the_probability_of_the_token() -> None:
    """Figure 2: the ratio and the difference apart, for tokens below 0.1, from 0.9 on, and between."""
    rows = Rows(2000, seed=3, spread=0.3)
    got = rows.loss().metrics.mismatch()
    mu, pi = rows.mu[rows.mask], rows.pi[rows.mask]
    difference = (pi.exp() - mu.exp()).abs()
    assert got["mean_abs_pi_mu"] == pytest.approx(difference.mean().item(), rel=1e-12)
    assert got["max_abs_pi_mu"] == pytest.approx(difference.max().item(), rel=1e-12)
    low, high = mu.exp() < 0.1, mu.exp() >= 0.9
    for band, inside in (("low", low), ("high", high), ("middle", ~low & ~high)):
        assert inside.sum() > 50
        assert got[f"abs_log_ratio_{band}"] == pytest.approx((pi - mu)[inside].abs().mean().item(), rel=1e-12)
        assert got[f"abs_pi_mu_{band}"] == pytest.approx(difference[inside].mean().item(), rel=1e-12)
    assert got["abs_log_ratio_low"] > 0.1
    assert got["abs_pi_mu_low"] < got["abs_pi_mu_middle"]
    assert "ratio_p99.9" in got
    nothing = policy_loss(presets.get("pg-is"), mu[:2], mu[:2], mu[:2], loss_mask=torch.zeros(2)).metrics
    assert nothing.mismatch() == {}


@pytest.mark.parametrize("spread", [1e-4, 0.02, 1.0, 8.0])
def test_ratio_quantiles_within_the_stated_error(spread: float) -> None:
    rows = Rows(5000, seed=1, spread=spread)
    got = rows.loss().metrics.finalize(1)
    log_ratio = (rows.pi - rows.mu)[rows.mask].sort().values
    for name, q in (("p0.1", 0.001), ("p1", 0.01), ("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999)):
        exact = log_ratio[math.ceil(q * len(log_ratio)) - 1].item()
        assert math.log(got[f"ratio_{name}"]) == pytest.approx(exact, rel=0.03, abs=1e-6), name


@settings(max_examples=25)
@given(size=st.integers(0, 60), parts=st.integers(1, 5), seed=st.integers(0, 2**31))
def test_any_split_merges_to_the_whole(size: int, parts: int, seed: int) -> None:
    rows = Rows(size, seed)
    owner = torch.randint(parts, (size,), generator=torch.Generator().manual_seed(seed))
    shares = [rows.loss(owner == part).metrics for part in range(parts)]
    merged = TokenMetrics.empty()
    for share in shares:
        merged = merged.merge(share)
    # What two all-reduces of the caller would do over ranks.
    reduced = TokenMetrics(
        torch.stack([s.sums for s in shares]).sum(0), torch.stack([s.maxima for s in shares]).amax(0)
    )
    whole = rows.loss().metrics.finalize(3)
    for result in (merged.finalize(3), reduced.finalize(3)):
        assert result.keys() == whole.keys()
        for name, value in whole.items():
            assert result[name] == pytest.approx(value, rel=1e-12, abs=1e-15), name
        counts = [
            n for n in whole if n == "tokens" or n.endswith(("fraction", "_max", "_min")) or n.startswith("ratio_p")
        ]
        assert {n: result[n] for n in counts} == {n: whole[n] for n in counts}


def test_metrics_of_what_was_not_given_are_absent() -> None:
    logp = torch.tensor([-1.0, -2.0])
    loss = policy_loss(presets.get("pg-is"), logp, logp, torch.ones(2), loss_mask=torch.ones(2))
    got = loss.metrics.finalize(1)
    assert not {n for n in got if "divergence" in n or "entropy" in n}
    assert got["ratio_p50"] == got["ratio_min"] == got["ratio_max"] == 1.0
    assert got["surrogate"] == got["linear_penalty_estimate"] == 0.0
    assert TokenMetrics.empty().finalize(1) == {"tokens": 0.0}


def test_returns_default_to_advantages_and_the_reward_bound_can_be_given() -> None:
    logp, mu = torch.tensor([math.log(0.6)]), torch.tensor([math.log(0.5)])
    loss = policy_loss(presets.get("pg-is"), logp, mu, torch.tensor([-0.5]), loss_mask=torch.ones(1))
    got = loss.metrics.finalize(1)
    assert got["surrogate"] == pytest.approx(-0.5 * 0.2, rel=1e-6)
    assert got["linear_penalty_estimate"] == pytest.approx(2 * 0.5 * 0.2, rel=1e-6)
    assert loss.metrics.finalize(1, reward_bound=1.0)["linear_penalty_estimate"] == pytest.approx(0.4, rel=1e-6)


def test_impossible_tokens_do_not_poison_counts() -> None:
    logp, mu = torch.tensor([-1.0, -math.inf, -1.0]), torch.tensor([-math.inf, -1.0, -1.0])
    preset = presets.get("dppo-binary-tv")
    loss = policy_loss(
        preset,
        logp,
        mu,
        torch.tensor([1.0, -1.0, 0.0]),
        loss_mask=torch.ones(3),
        divergence=divergence_for(preset, logp=logp, mu_logp=mu),
    )
    got = loss.metrics.finalize(1)
    assert got["masked_fraction"] == pytest.approx(2 / 3)
    assert got["abs_prob_diff_max"] == pytest.approx(math.exp(-1))
    assert got["ratio_max"] == math.inf
    assert got["ratio_min"] == 0.0
    assert got["ratio_p50"] == 1.0


def test_most_masked_tokens_by_sign() -> None:
    ids = torch.tensor([5, 5, 5, 7, 7, 9, 3, 3, 10**6])
    advantages = torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0, -1.0, 1.0, 1.0, 1.0])
    loss_mask = torch.tensor([True] * 8 + [False])
    mask = torch.tensor([False, False, True, False, False, False, False, True, False])
    counts = masked_token_counts(ids, advantages, loss_mask, mask, vocab_size=12)
    assert most_masked_tokens(counts) == {"positive": [(5, 2), (3, 1), (7, 1)], "negative": [(7, 1), (9, 1)]}
    assert most_masked_tokens(counts, limit=1) == {"positive": [(5, 2)], "negative": [(7, 1)]}
    halves = [masked_token_counts(ids[s], advantages[s], loss_mask[s], mask[s], 12) for s in (slice(0, 4), slice(4, 9))]
    assert torch.equal(halves[0] + halves[1], counts)


def test_masked_tokens_agree_with_the_masked_fraction() -> None:
    rows = Rows(300, seed=4)
    loss = rows.loss()
    counts = masked_token_counts(rows.ids, rows.advantages, rows.mask, loss.mask, vocab_size=10)
    got = loss.metrics.finalize(1)
    assert counts.sum().item() == round(got["masked_fraction"] * got["tokens"])
    assert counts[1].sum().item() == round(
        got["masked_fraction_negative"] * int((rows.advantages[rows.mask] < 0).sum())
    )


def test_a_ratio_that_is_nan_shows_as_nan() -> None:
    """In the mean and both ends, and not as a ratio that overflowed."""
    pi, mu, rows = torch.tensor([torch.nan, -1.0]), torch.tensor([-1.0, -1.0]), torch.ones(2)
    found = policy_loss(presets.get("pg-is"), pi, mu, rows, loss_mask=rows).metrics.finalize(1)
    assert all(math.isnan(found[f"ratio_{which}"]) for which in ("mean", "min", "max"))
