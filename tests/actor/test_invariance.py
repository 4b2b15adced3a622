"""What must not change a gradient: how sequences are packed, split and ordered."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.actor.conftest import World
from tests.actor.matrix import Case, Lesson, Trained, train_cases
from tests.distributed import run_ranks

ORDER = np.random.default_rng(7).permutation(12)
ONE_STEP = [[np.arange(12)]]


@pytest.fixture(scope="module")
def lesson(world: World) -> Lesson:
    return replace(world.lesson, updates=ONE_STEP)


@pytest.fixture(scope="module")
def expected(world: World, lesson: Lesson) -> Trained:
    [[trained]] = run_ranks(train_cases, 1, str(world.path), {}, lesson, [Case("dppo-topk-kl", budget=1000)])
    return trained


@pytest.mark.parametrize(
    ("ranks", "layout", "shuffled"),
    [(1, {}, True), (2, {}, False), (2, {}, True), (2, {"context": 2}, True), (4, {"context": 2, "expert": 2}, False)],
    ids=["1 rank, other order", "DP2", "DP2, other order", "CP2, other order", "CP2 DP2 EP2"],
)
def test_the_gradient_is_the_same(
    world: World, lesson: Lesson, expected: Trained, ranks: int, layout: dict, shuffled: bool
) -> None:
    """Budgets of one pack, a few packs, and about one sequence per pack (the longest has 20 tokens). Both sides are in
    float32, each off by about 2e-6 of the norm (`reference.py`)."""
    taught = lesson.reordered(ORDER) if shuffled else lesson
    cases = [Case("dppo-topk-kl", budget=budget) for budget in (1000, 64, 20)]
    results = run_ranks(train_cases, ranks, str(world.path), layout, taught, cases)
    norm = expected.metrics[0]["optimizer/grad_norm"]
    for case, got in zip(cases, results[0], strict=True):
        assert got.metrics[0]["optimizer/loss"] == pytest.approx(expected.metrics[0]["optimizer/loss"], abs=1e-6)
        for name, gradient in got.gradients[0].items():
            difference = np.abs(gradient - expected.gradients[0][name]).max()
            assert difference <= 4e-6 * norm, f"{case.budget}: {name} differs by {difference}"


def test_ratios_of_whole_responses_are_the_same_however_these_are_split(world: World, lesson: Lesson) -> None:
    """Products and geometric means over responses that two context-parallel ranks share, some kept and some dropped."""
    presets = ("sequence-tis", "sequence-mis", "geometric-mis")
    [whole] = run_ranks(
        train_cases, 1, str(world.path), {}, lesson, [Case(preset, False, budget=1000) for preset in presets]
    )
    split = run_ranks(
        train_cases, 2, str(world.path), {"context": 2}, lesson, [Case(preset, False) for preset in presets]
    )[0]
    for preset, expected, got in zip(presets, whole, split, strict=True):
        one, other = expected.metrics[0], got.metrics[0]
        assert other["policy/masked_fraction"] == one["policy/masked_fraction"], preset
        assert (preset == "sequence-tis") == (one["policy/masked_fraction"] == 0), preset
        assert one["policy/masked_fraction"] < 0.95, preset
        norm = one["optimizer/grad_norm"]
        assert norm > 0, preset
        for name, gradient in got.gradients[0].items():
            difference = np.abs(gradient - expected.gradients[0][name]).max()
            # A ratio of eleven tokens is off by what the log-probability of each is.
            assert difference <= 1e-4 * norm, f"{preset}: {name} differs by {difference}"
