"""Gradient steps of the actor under every layout, against transformers and autograd in float64 (`reference.py`):
random forced routes with gaps, packed sequences, several objectives, recomputation and both token dispatchers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from megatron_dppo.batch import RolloutBatch
from tests.actor.matrix import (
    CLIP,
    EPSILON,
    LAYOUTS,
    LR,
    NORMALISER,
    SHAPE,
    TEMPERATURE,
    UPDATES,
    Case,
    Trained,
    advantages,
    train_cases,
)
from tests.distributed import run_ranks
from tests.tiny import tiny_qwen3_moe

PRESETS = ["dppo-binary-tv", "dppo-topk-kl", "grpo-clip-higher", "minirl", "gspo"]
RECOMPUTE = ["none", "selective", "full"]
DISPATCHERS = ["alltoall", "allgather"]


@dataclass(frozen=True)
class World:
    """The rollout everybody trains on, and what training it should give."""

    path: Path
    batch: RolloutBatch
    expected: Callable[[str, bool], tuple[list, dict[str, np.ndarray]]]
    """(preset, replay) to (loss, norm and gradients of each step, weights after all)."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    import copy
    import functools

    from tests.actor.reference import Reference, make_rollout

    path = tmp_path_factory.mktemp("model")
    model = tiny_qwen3_moe(path, seed=3)
    model.model.embed_tokens.padding_idx = None  # transformers would not train the row of the padding token
    batch = make_rollout(model, seed=4, temperature=TEMPERATURE, **SHAPE)

    @functools.cache
    def expected(preset: str, replay: bool) -> tuple[list, dict[str, np.ndarray]]:
        trained = copy.deepcopy(model).double()
        trained.set_experts_implementation("eager")  # the grouped product has no float64
        reference = Reference(trained, batch, advantages(), preset, NORMALISER, TEMPERATURE, replay)
        history = reference.train(UPDATES, lr=LR, clip=CLIP, epsilon=EPSILON)
        return history, {name: p.detach().numpy() for name, p in trained.named_parameters()}

    return World(path, batch, expected)


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


COVER = pairwise_cover(list(LAYOUTS), PRESETS, [True, False], RECOMPUTE, DISPATCHERS)


def test_the_cover_covers_every_pair():
    axes = [list(LAYOUTS), PRESETS, [True, False], RECOMPUTE, DISPATCHERS]
    for i, j in itertools.combinations(range(len(axes)), 2):
        assert {(row[i], row[j]) for row in COVER} == set(itertools.product(axes[i], axes[j]))


@pytest.mark.parametrize("layout", list(LAYOUTS))
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
    ranks, sizes = LAYOUTS[layout]
    results = run_ranks(train_cases, ranks, str(world.path), sizes, world.batch, cases, timeout=60 + 60 * len(cases))
    for number, case in enumerate(cases):
        of_ranks = [result[number] for result in results]
        assert all(other.metrics == of_ranks[0].metrics for other in of_ranks), f"{case}: ranks disagree on metrics"
        compare(world, case, of_ranks[0])


def compare(world: World, case: Case, got: Trained) -> None:
    from tests.actor.reference import by_hf_name

    history, weights = world.expected(case.preset, case.replay)
    steps = iter(history)
    for metrics, mini_batches in zip(got.metrics, UPDATES, strict=True):
        losses, norms, _ = zip(*(next(steps) for _ in mini_batches), strict=True)
        assert metrics["optimizer/loss"] == pytest.approx(np.mean(losses), rel=1e-5, abs=1e-6), case
        assert metrics["optimizer/grad_norm"] == pytest.approx(np.mean(norms), rel=3e-5), case
    # With an anchor recomputed before a single mini-batch nothing can be masked; with two something must be.
    assert got.metrics[0]["policy/masked_fraction"] > 0.02, f"{case}: too easy, nothing was masked"
    assert len(got.gradients) == len(history)
    for step, (gradients, (_, norm, expected)) in enumerate(zip(got.gradients, history, strict=True)):
        assert len(gradients) > 100
        for name, gradient in gradients.items():
            np.testing.assert_allclose(
                gradient,
                by_hf_name(expected, name),
                atol=2e-6 * norm,
                rtol=1e-5,
                err_msg=f"{case}: gradient {step} of {name}",
            )
    for name, tensor in got.weights.items():
        np.testing.assert_allclose(tensor, by_hf_name(weights, name), atol=2e-6, rtol=0, err_msg=f"{case}: {name}")
    if case.replay:
        layers = SHAPE["moe_layers"]
        replayed = sum(metrics["r3/replayed_routings"] for metrics in got.metrics)
        gaps = sum(metrics["r3/gap_routings"] for metrics in got.metrics)
        assert (replayed, gaps) == (world.batch.routes.valid.sum() * layers, (~world.batch.routes.valid).sum() * layers)
        assert all(m["r3/differing_fraction"] > 0.5 for m in got.metrics), (
            "random routes must differ from the live ones"
        )
