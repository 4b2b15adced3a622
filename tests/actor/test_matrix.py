"""Gradient steps of the actor under every layout, against transformers and autograd in float64 (`reference.py`):
random forced routes with gaps, packed sequences, several objectives, recomputation and both token dispatchers."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from tests.actor.conftest import World
from tests.actor.matrix import (
    FAMILIES,
    KIN,
    LAYOUTS,
    UPDATES,
    Case,
    Trained,
    check_refusal,
    runs,
    train_cases,
    train_layouts,
)
from tests.actor.reference import compare_training
from tests.distributed import run_ranks

PRESETS = ["dppo-binary-tv", "dppo-topk-kl", "grpo-clip-higher", "minirl", "gspo"]
RECOMPUTE = ["none", "selective", "full"]
DISPATCHERS = ["alltoall", "allgather"]


def pairwise_cover(*axes: list) -> list[tuple]:
    """Few combinations in which every pair of values of every two axes occurs (greedy, deterministic)."""
    everything = list(itertools.product(*axes))

    def pairs(row: tuple) -> set:
        return {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)}

    missing, chosen = set().union(*(pairs(row) for row in everything)), []
    while missing:
        best = max(everything, key=lambda row: len(pairs(row) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


ONLY_IN_FULL = {"DP2 ETP2", "TP2 CP2 EP4", "PP2 VPP2 EP2", "PP2 CP2", "TP2 EP2 ETP2"}
IN_EVERY_RUN = [layout for layout in LAYOUTS if layout not in ONLY_IN_FULL]
COVER = pairwise_cover(IN_EVERY_RUN, PRESETS, [True, False], RECOMPUTE, DISPATCHERS)


def test_the_cover_covers_every_pair():
    axes = [IN_EVERY_RUN, PRESETS, [True, False], RECOMPUTE, DISPATCHERS]
    for i, j in itertools.combinations(range(len(axes)), 2):
        assert {(row[i], row[j]) for row in COVER} == set(itertools.product(axes[i], axes[j]))


@pytest.mark.parametrize("layout", IN_EVERY_RUN)
def test_three_steps_equal_transformers(world: World, layout: str) -> None:
    cases = [
        Case(preset, replay, recompute, dispatcher)
        for name, preset, replay, recompute, dispatcher in COVER
        if name == layout
    ]
    check_layout(world, layout, cases)


@pytest.mark.full
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_three_steps_equal_transformers_in_every_combination(world: World, layout: str) -> None:
    check_layout(
        world, layout, [Case(*row) for row in itertools.product(PRESETS, [True, False], RECOMPUTE, DISPATCHERS)]
    )


def check_layout(world: World, layout: str, cases: list[Case]) -> None:
    """On fresh ranks for every few cases: groups that were made anew leave sockets and threads behind."""
    ranks, sizes = LAYOUTS[layout]
    for few in (cases[i : i + 6] for i in range(0, len(cases), 6)):
        results = run_ranks(train_cases, ranks, str(world.path), sizes, world.lesson, few, timeout=300 + 60 * len(few))
        for number, case in enumerate(few):
            of_ranks = [result[number] for result in results]
            assert all(other.metrics == of_ranks[0].metrics for other in of_ranks), f"{case}: ranks disagree on metrics"
            compare(world, case, of_ranks[0])


FEW = [Case(), Case("grpo-clip-higher", replay=False, recompute="selective")]
TOGETHER: dict[int, list[str]] = {1: ["1 rank"], 2: ["TP2", "PP2", "CP2", "EP2", "TP2 EP2"], 4: ["TP2 PP2 EP2"]}
"""Layouts of each number of ranks, for families beside the first."""


@pytest.mark.parametrize("ranks", TOGETHER)
def test_other_families_equal_transformers(worlds: Callable[[str], World], ranks: int) -> None:
    """The objectives' own differences are the first family's matter."""
    todo = [(family, layout) for family in FAMILIES for layout in TOGETHER[ranks] if runs(family, layout)]
    check_families(worlds, ranks, [(family, layout, [FEW[i % 2]]) for i, (family, layout) in enumerate(todo)])


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES + KIN)
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_other_families_equal_transformers_in_every_layout(
    worlds: Callable[[str], World], layout: str, family: str
) -> None:
    if not runs(family, layout):
        check_refusal(worlds(family).path, layout)
        return
    cases = [Case(*row) for row in zip(PRESETS, [True, False] * 3, RECOMPUTE * 2, DISPATCHERS * 3, strict=False)]
    check_families(worlds, LAYOUTS[layout][0], [(family, layout, cases)])


def check_families(worlds: Callable[[str], World], ranks: int, todo: list[tuple[str, str, list[Case]]]) -> None:
    """On fresh ranks for every family, see `check_layout`."""
    for family, of_family in itertools.groupby(todo, key=lambda one: one[0]):
        world, jobs = worlds(family), [(LAYOUTS[layout][1], cases) for _, layout, cases in of_family]
        results = run_ranks(train_layouts, ranks, str(world.path), world.lesson, jobs, timeout=300 + 60 * len(jobs))
        for number, (sizes, cases) in enumerate(jobs):
            for index, case in enumerate(cases):
                of_ranks = [result[number][index] for result in results]
                assert all(other.metrics == of_ranks[0].metrics for other in of_ranks), (
                    f"{family}, {sizes}: ranks disagree"
                )
                compare(world, case, of_ranks[0])


def compare(world: World, case: Case, got: Trained) -> None:
    history, weights = world.expected(case.preset, case.replay)
    compare_training(got, history, weights, UPDATES, str(case))
    # With an anchor recomputed before a single mini-batch nothing can be masked; with two something must be.
    assert got.metrics[0]["policy/masked_fraction"] > 0.02, f"{case}: too easy, nothing was masked"
    if case.replay:
        layers = world.lesson.batch.routes.experts.shape[1]
        replayed = sum(metrics["r3/replayed_routings"] for metrics in got.metrics)
        gaps = sum(metrics["r3/gap_routings"] for metrics in got.metrics)
        assert (replayed, gaps) == (
            world.lesson.batch.routes.valid.sum() * layers,
            (~world.lesson.batch.routes.valid).sum() * layers,
        )
        assert all(m["r3/differing_fraction"] > 0.5 for m in got.metrics), (
            "random routes must differ from the live ones"
        )
