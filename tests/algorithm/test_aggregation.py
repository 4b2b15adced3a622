"""Aggregations against their formulas, and the same gradient whatever way a batch is split."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_dppo.algorithm import (
    Aggregation,
    Denominators,
    aggregate,
    divergence_for,
    policy_loss,
    presets,
    token_weights,
)

FEATURES = 5
CONSTANT = 17.0


class Batch:
    """Ragged sequences in one flat array, with a linear model: logp = features @ theta."""

    def __init__(self, lengths: list[int], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.sequences = len(lengths)
        self.ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        rows = len(self.ids)

        def uniform(low: float, high: float, *shape: int) -> Tensor:
            return torch.empty(*shape, dtype=torch.float64).uniform_(low, high, generator=generator)

        self.features = uniform(-1, 0, rows, FEATURES)
        self.theta = uniform(0.1, 1, FEATURES)
        self.mu = uniform(-3, 0, rows)
        self.recomputed = uniform(-3, 0, rows)
        self.advantages = uniform(-1, 1, self.sequences)[self.ids]
        self.loss_mask = uniform(0, 1, rows) < 0.7
        self.counts = torch.bincount(self.ids[self.loss_mask], minlength=self.sequences)
        self.denominators = Denominators(tokens=int(self.loss_mask.sum()), sequences=self.sequences, constant=CONSTANT)
        # What excluded rows hold must not matter.
        self.mu = torch.where(self.loss_mask, self.mu, torch.nan)

    def gradient(
        self, preset_name: str, mode: Aggregation, rows: Tensor, reduce: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Loss and gradient of theta from these rows alone."""
        preset = presets.get(preset_name)
        theta = self.theta.clone().requires_grad_()
        logp, mu = self.features[rows] @ theta, self.mu[rows]
        recomputed = self.recomputed[rows] if preset.needs_recomputed_logp else None
        loss = policy_loss(
            preset,
            logp,
            mu,
            self.advantages[rows],
            loss_mask=self.loss_mask[rows],
            divergence=divergence_for(preset, logp=logp, mu_logp=mu, recomputed_logp=recomputed),
            recomputed_logp=recomputed,
            sequence_ids=self.ids[rows],
            num_sequences=self.sequences,
            sequence_reduce=reduce,
        )
        weights = token_weights(
            self.loss_mask[rows], mode, self.denominators, sequence_tokens=self.counts[self.ids[rows]]
        )
        scalar = aggregate(loss.per_token, weights)
        (gradient,) = torch.autograd.grad(scalar, theta)
        return scalar.detach(), gradient


def reference(mode: str, losses: list[list[float]]) -> float:
    """The formulas of `Aggregation`, over the trainable tokens of each sequence."""
    n = len(losses)
    if mode == "token-mean":
        return math.fsum(map(math.fsum, losses)) / sum(map(len, losses))
    if mode == "seq-mean-token-sum":
        return math.fsum(map(math.fsum, losses)) / n
    if mode == "seq-mean-token-sum-norm":
        return math.fsum(math.fsum(row) / CONSTANT for row in losses) / n
    return math.fsum(math.fsum(row) / len(row) for row in losses if row) / n


@pytest.mark.parametrize("mode", list(Aggregation))
def test_value_is_the_formula(mode: Aggregation) -> None:
    batch = Batch([4, 1, 9, 2, 6], seed=1)
    per_token = torch.rand(len(batch.ids), dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    losses = [per_token[(batch.ids == s) & batch.loss_mask].tolist() for s in range(batch.sequences)]
    weights = token_weights(batch.loss_mask, mode, batch.denominators, sequence_tokens=batch.counts[batch.ids])
    assert weights.dtype == torch.float64
    assert aggregate(per_token, weights).item() == pytest.approx(reference(mode, losses), rel=1e-14)


@pytest.mark.parametrize("mode", list(Aggregation))
@pytest.mark.parametrize("preset", ["dppo-binary-tv", "dppo-binary-kl", "minirl-tis", "icepop-decoupled"])
@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    parts=st.integers(2, 5),
    seed=st.integers(0, 2**31),
)
def test_gradient_does_not_depend_on_the_split(
    preset: str, mode: Aggregation, lengths: list[int], parts: int, seed: int
) -> None:
    """Rows dealt to microbatches and ranks at random, sequences split as by context parallelism, parts empty."""
    batch = Batch(lengths, seed)
    rows = torch.arange(len(batch.ids))
    whole_loss, whole = batch.gradient(preset, mode, rows)
    generator = torch.Generator().manual_seed(seed)
    owner = torch.randint(parts, rows.shape, generator=generator)
    shuffled = torch.randperm(len(rows), generator=generator)
    shares = [batch.gradient(preset, mode, shuffled[owner[shuffled] == part]) for part in range(parts)]
    assert (sum(loss for loss, _ in shares) - whole_loss).abs() <= 1e-12
    assert (sum(gradient for _, gradient in shares) - whole).abs().max() <= 1e-12


@pytest.mark.parametrize("mode", list(Aggregation))
@pytest.mark.parametrize("preset", ["gspo", "sequence-tis", "sequence-mis", "geometric-mis"])
@settings(max_examples=10)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), seed=st.integers(0, 2**31))
def test_sequence_level_ratios_do_not_depend_on_the_split_either(
    preset: str, mode: Aggregation, lengths: list[int], seed: int
) -> None:
    """Whole sequences over microbatches, or split over two context-parallel ranks whose totals are summed."""
    batch = Batch(lengths, seed)
    rows = torch.arange(len(batch.ids))
    _, whole = batch.gradient(preset, mode, rows)

    by_sequence = [batch.gradient(preset, mode, rows[batch.ids == s])[1] for s in range(batch.sequences)]
    assert (sum(by_sequence) - whole).abs().max() <= 1e-12

    halves = [rows[rows % 2 == 0], rows[rows % 2 == 1]]
    totals: list[list[Tensor]] = [[], []]
    for half, own in zip(halves, totals, strict=True):  # what each rank would contribute to each all-reduce
        batch.gradient(preset, mode, half, lambda total, own=own: own.append(total) or total)
    split = []
    for half in halves:
        sums = iter([one + two for one, two in zip(*totals, strict=True)])
        split.append(batch.gradient(preset, mode, half, lambda _, sums=sums: next(sums))[1])
    assert (sum(split) - whole).abs().max() <= 1e-12


def test_excluded_rows_never_matter() -> None:
    per_token = torch.tensor([1.0, math.nan, math.inf, 2.0], requires_grad=True)
    mask = torch.tensor([True, False, False, True])
    weights = token_weights(mask, "token-mean", Denominators(tokens=2, sequences=1))
    loss = aggregate(per_token, weights)
    loss.backward()
    assert loss.item() == 1.5
    assert per_token.grad.tolist() == [0.5, 0.0, 0.0, 0.5]


@pytest.mark.parametrize("mode", list(Aggregation))
def test_nothing_trainable(mode: Aggregation) -> None:
    mask = torch.zeros(3, dtype=torch.bool)
    weights = token_weights(
        mask, mode, Denominators(tokens=0, sequences=1), sequence_tokens=torch.zeros(3, dtype=torch.int64)
    )
    per_token = torch.zeros(3, requires_grad=True)
    aggregate(per_token, weights).backward()
    assert per_token.grad.tolist() == [0.0, 0.0, 0.0]


def test_bad_input_is_named() -> None:
    mask = torch.ones(2, dtype=torch.bool)
    with pytest.raises(ValueError, match="needs sequence_tokens"):
        token_weights(mask, "seq-mean-token-mean", Denominators(tokens=2, sequences=1))
    with pytest.raises(ValueError, match="'mean' is not a valid Aggregation"):
        token_weights(mask, "mean", Denominators(tokens=2, sequences=1))
    for bad in ({"tokens": -1, "sequences": 1}, {"tokens": 1, "sequences": 0}):
        with pytest.raises(ValueError, match="denominators must satisfy"):
            Denominators(**bad)
    with pytest.raises(ValueError, match="constant=0"):
        Denominators(tokens=1, sequences=1, constant=0)
