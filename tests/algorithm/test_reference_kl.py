"""Estimates of the KL to a reference: values, and what their gradients are on average, by sums over a vocabulary."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_dppo.algorithm import KLEstimator, divergence_for, kl_of_sampled, kl_of_topk, policy_loss, presets

ALL = torch.ones(7, dtype=torch.bool)
PAIRS = [(0.5, 0.5), (0.9, 0.1), (1e-6, 0.3), (1.0, 1e-4), (0.2, 0.999)]


@pytest.mark.parametrize(("pi", "reference"), PAIRS)
def test_values_are_the_formulas(pi: float, reference: float) -> None:
    logp, other = (torch.tensor([p], dtype=torch.float64).log() for p in (pi, reference))
    d = math.log(pi) - math.log(reference)
    expected = {"k1": d, "k2": 0.5 * d * d, "k3": reference / pi - 1 - math.log(reference / pi)}
    for name, value in expected.items():
        assert kl_of_sampled(KLEstimator(name), logp, other, ALL[:1]).item() == pytest.approx(
            value, rel=1e-12, abs=1e-15
        )
    with pytest.raises(ValueError, match="see kl_of_topk"):
        kl_of_sampled(KLEstimator.TOPK, logp, other, ALL[:1])


def distributions() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    return logits[0].clone().requires_grad_(), logits[1].log_softmax(-1)


def test_what_the_gradients_are_on_average() -> None:
    """sum_a pi(a) grad k(a): nothing for k1, that of KL(pi, reference) for k2, that of KL(reference, pi) for k3."""
    logits, reference = distributions()

    def gradient(value: Tensor) -> Tensor:
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    logp = logits.log_softmax(-1)
    forward = gradient((logp.exp() * (logp - reference)).sum())
    backward = gradient((reference.exp() * (reference - logp)).sum())
    assert forward.abs().max() > 0.05
    average = {
        name: gradient((logp.exp().detach() * kl_of_sampled(KLEstimator(name), logp, reference, ALL)).sum())
        for name in ("k1", "k2", "k3")
    }
    torch.testing.assert_close(average["k1"], torch.zeros(7, dtype=torch.float64), rtol=0, atol=1e-15)
    torch.testing.assert_close(average["k2"], forward, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(average["k3"], backward, rtol=1e-12, atol=1e-15)


def test_k1_and_k3_are_unbiased_and_topk_is_exact() -> None:
    logits, reference = distributions()
    logp = logits.detach().log_softmax(-1)
    exact = (logp.exp() * (logp - reference)).sum()
    for name in ("k1", "k3"):
        mean = (logp.exp() * kl_of_sampled(KLEstimator(name), logp, reference, ALL)).sum()
        torch.testing.assert_close(mean, exact, rtol=1e-12, atol=0)
    every = torch.ones(1, 7, dtype=torch.bool)
    one = torch.ones(1, dtype=torch.bool)
    torch.testing.assert_close(kl_of_topk(logp[None], reference[None], every, one)[0], exact, rtol=1e-9, atol=0)
    some = every.clone()
    some[:, 4:] = False
    rest, other = logp[4:].exp().sum(), reference[4:].exp().sum()
    reduced = (logp[:4].exp() * (logp[:4] - reference[:4])).sum() + rest * (rest / other).log()
    torch.testing.assert_close(kl_of_topk(logp[None], reference[None], some, one)[0], reduced, rtol=1e-9, atol=0)


def sets() -> tuple[Tensor, Tensor, Tensor]:
    """Logits of pi with gradient, log of the reference, and members that leave some tokens out: `[5, 9]`."""
    generator = torch.Generator().manual_seed(5)
    logits, reference = torch.randn(2, 5, 9, generator=generator, dtype=torch.float64)
    member = torch.rand(5, 9, generator=generator) < 0.6
    member[:, 0], member[:, 1] = True, False
    return logits.requires_grad_(), reference.log_softmax(-1), member


def test_the_gradient_over_sets_is_that_of_the_formula() -> None:
    logits, reference, member = sets()
    every = torch.ones(5, dtype=torch.bool)

    def kl(logits: Tensor) -> Tensor:
        return kl_of_topk(logits.log_softmax(-1), reference, member, every)

    assert torch.autograd.gradcheck(kl, logits)
    logp = logits.detach().log_softmax(-1).requires_grad_()
    (gradient,) = torch.autograd.grad(kl_of_topk(logp, reference, member, every).sum(), logp)
    with torch.no_grad():
        rest, other = (1 - torch.where(member, one.exp(), 0.0).sum(-1, keepdim=True) for one in (logp, reference))
        formula = torch.where(member, logp.exp() * (logp - reference - (rest / other).log()), 0.0)
    torch.testing.assert_close(gradient, formula, rtol=1e-9, atol=1e-14)
    (at_reference,) = torch.autograd.grad(kl_of_topk(logp, logp.detach(), member, every).sum(), logp)
    torch.testing.assert_close(at_reference, torch.zeros_like(logp), rtol=0, atol=1e-14)


def test_no_gradient_comes_from_what_does_not_count_and_none_is_nan() -> None:
    """Columns and rows that are left out hold anything; certain tokens and lost ones."""
    logits, reference, member = sets()
    trained = torch.tensor([True, False, True, True, True])
    logp = logits.detach().log_softmax(-1)
    logp[2] = torch.tensor([0.0, *[-math.inf] * 8])  # all mass on one token, and float32 may say so
    logp[3, 0] = 0.0  # more than 1 in all, as rounding may leave it
    logp[4, 2] = -200.0
    member[4, 2] = True
    expected = kl_of_topk(logp, reference, member, trained)
    dirty = logp.masked_fill(~(member & trained[:, None]), math.nan).requires_grad_()
    found = kl_of_topk(dirty, reference.masked_fill(~member, math.nan), member, trained)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert found[1] == 0
    (gradient,) = torch.autograd.grad(found.sum(), dirty)
    assert gradient.isfinite().all()
    assert (gradient[~(member & trained[:, None])] == 0).all()
    assert gradient[3, 0] != 0
    reference[0, 0] = -math.inf  # what the reference has lost shows as a loss that is not finite
    assert kl_of_topk(logp, reference, member, trained)[0] == math.inf


def test_the_penalty_is_added_on_trained_rows_blocked_or_not() -> None:
    preset = presets.get("dppo-binary-tv")
    mu, pi = torch.tensor([0.2, 0.5, 0.5]).log(), torch.tensor([0.9, 0.5, 0.5]).log().requires_grad_()
    reference = torch.tensor([0.3, 0.4, math.nan]).log()
    trained = torch.tensor([True, True, False])

    def loss(coefficient: float | None) -> tuple[Tensor, Tensor, dict[str, float]]:
        penalty = None if coefficient is None else kl_of_sampled(KLEstimator.K2, pi, reference, trained)
        found = policy_loss(
            preset,
            pi,
            mu,
            torch.ones(3),
            loss_mask=trained,
            divergence=divergence_for(preset, logp=pi, mu_logp=mu),
            penalty=penalty,
            penalty_coefficient=coefficient or 0.0,
        )
        assert found.mask.tolist() == [False, True, False]
        (gradient,) = torch.autograd.grad(found.per_token.sum(), pi)
        return found.per_token.detach(), gradient, found.metrics.finalize(1)

    without, with_zero, with_some = loss(None), loss(0.0), loss(0.1)
    assert torch.equal(without[0], with_zero[0])
    assert torch.equal(without[1], with_zero[1])
    d = [math.log(0.9 / 0.3), math.log(0.5 / 0.4)]
    assert (with_some[0] - without[0]).tolist() == pytest.approx([0.05 * d[0] ** 2, 0.05 * d[1] ** 2, 0.0], rel=1e-4)
    assert (with_some[1] - without[1]).tolist() == pytest.approx([0.1 * d[0], 0.1 * d[1], 0.0], rel=1e-4)
    assert "reference_kl_mean" not in without[2]
    for metrics in (with_zero[2], with_some[2]):
        assert metrics["reference_kl_mean"] == pytest.approx((d[0] ** 2 + d[1] ** 2) / 4, rel=1e-4)
