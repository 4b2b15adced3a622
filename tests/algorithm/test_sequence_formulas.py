"""Presets whose ratio is one for a whole response, against their formulas written out response by response."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dppo.algorithm import policy_loss, presets

Rows = list[tuple[int, float, float, bool]]
"""(sequence, log mu, log r, trained)"""
ROWS = st.lists(
    st.tuples(
        st.integers(0, 3), st.floats(-4, 0), st.one_of(st.floats(-0.9, 0.9), st.floats(-2e-3, 2e-3)), st.booleans()
    ),
    min_size=1,
    max_size=15,
)


@pytest.mark.parametrize("name", ["sequence-tis", "sequence-mis", "geometric-mis"])
@settings(max_examples=100)
@given(rows=ROWS)
def test_masks_and_weights_of_whole_responses(name: str, rows: Rows) -> None:
    """rho(y) = prod_t r_t: weight min(rho, 2); weight rho where rho <= 2, else 0; weight min(r_t, 2) where the
    geometric mean lies in [1 / 1.001, 1.001], else 0."""
    advantage = [1.0, -1.0, 0.5, -0.5]
    steps = {s: [step for i, _, step, on in rows if on and i == s] for s in range(4)}
    rho = {s: math.prod(math.exp(step) for step in steps[s]) for s in steps}
    mean = {s: rho[s] ** (1 / max(len(steps[s]), 1)) for s in steps}
    mu = torch.tensor([m if on else math.nan for _, m, _, on in rows], dtype=torch.float64)
    logp = (mu + torch.tensor([step for _, _, step, _ in rows], dtype=torch.float64)).requires_grad_()
    loss = policy_loss(
        presets.get(name),
        logp,
        mu,
        torch.tensor([advantage[s] for s, *_ in rows], dtype=torch.float64),
        loss_mask=torch.tensor([on for *_, on in rows]),
        sequence_ids=torch.tensor([s if on else -1 for s, _, _, on in rows]),
    )
    (gradient,) = torch.autograd.grad(loss.per_token.sum(), logp)
    for i, (s, _, step, on) in enumerate(rows):
        if min(abs(rho[s] - 2), abs(mean[s] - 1.001), abs(mean[s] - 1 / 1.001)) < 1e-9:
            continue
        if name == "geometric-mis":
            weight, kept = min(math.exp(step), 2.0), 1 / 1.001 <= mean[s] <= 1.001
        elif name == "sequence-mis":
            weight, kept = rho[s], rho[s] <= 2
        else:
            weight, kept = min(rho[s], 2.0), True
        expected = -weight * advantage[s] if on and kept else 0.0
        assert loss.mask[i].item() is (on and kept)
        assert loss.per_token[i].item() == pytest.approx(expected, rel=1e-11)
        assert gradient[i].item() == pytest.approx(expected, rel=1e-11)


def test_a_response_whose_ratio_overflows_is_dropped_or_cut() -> None:
    mu, logp = torch.full((4,), -800.0).double(), torch.full((4,), -0.1).double()
    arguments = {"loss_mask": torch.ones(4).bool(), "sequence_ids": torch.zeros(4).long()}
    dropped = policy_loss(presets.get("sequence-mis"), logp.requires_grad_(), mu, torch.ones(4).double(), **arguments)
    assert dropped.per_token.tolist() == [0.0] * 4
    cut = policy_loss(presets.get("sequence-tis"), logp, mu, torch.ones(4).double(), **arguments)
    assert cut.per_token.tolist() == [-2.0] * 4


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
