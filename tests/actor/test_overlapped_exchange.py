"""One microbatch's forward beside another's backward: training as without, and routes of each one's own microbatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.actor.conftest import World
from tests.actor.matrix import FAMILIES, LAYOUTS, Case, Lesson, Trained, advantages, build_actor, train_actor
from tests.actor.test_matrix import check_families, check_layout, compare
from tests.distributed import run_ranks

OVERLAPPED = {name: (ranks, sizes | {"overlap_expert_exchange": True}) for name, (ranks, sizes) in LAYOUTS.items()}
CASES = [Case(), Case(recompute="selective")]


@pytest.mark.parametrize("layout", ["EP2", pytest.param("PP2 VPP2 EP2", marks=pytest.mark.full)])
def test_three_steps_equal_transformers(world: World, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAYOUTS, layout, OVERLAPPED[layout])
    check_layout(world, layout, CASES)


def train_overlapped(rank: int, path: str, layout: dict, lesson: Lesson) -> Trained:
    actor = build_actor(path, layout, CASES[0], overlap_grad_reduce=True, overlap_param_gather=True)
    return train_actor(rank, actor, lesson)


def test_gradients_and_weights_cross_ranks_beside_it(world: World) -> None:
    """Megatron-Core's hooks for these are on modules, which run in parts here."""
    ranks, sizes = OVERLAPPED["EP2"]
    results = run_ranks(train_overlapped, ranks, str(world.path), sizes, world.lesson)
    assert results[0].metrics == results[1].metrics
    compare(world, CASES[0], results[0])


@pytest.mark.full
def test_other_families_equal_transformers(worlds: Callable[[str], World], monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense layers, shared experts, latent attention, delta rules, biases."""
    monkeypatch.setitem(LAYOUTS, "EP2", OVERLAPPED["EP2"])
    check_families(worlds, 2, [(family, "EP2", CASES[:1]) for family in FAMILIES])


def called(rank: int, path: str, layout: dict, lesson: Lesson) -> tuple[list[tuple[str, int, int]], bool]:
    """What routers did in one step, (forward or backward, microbatch, layer) in order; and whether each used the
    recorded experts of the microbatch that it was called for."""
    from megatron_dppo.actor.actor import TrainingSignal
    from megatron_dppo.batch import InMemorySource
    from megatron_dppo.router_replay.replay import RouterReplayController

    actor = build_actor(path, layout, Case())
    calls: list[tuple[str, int, int]] = []
    right: list[bool] = []
    for layer, router in actor._passes.routers:

        def watch(module: Any, inputs: Any, output: Any, layer: int = layer) -> None:
            controller: RouterReplayController = module.router_replay.controller
            targets = controller._targets
            assert targets is not None
            calls.append(("forward", targets.microbatch, layer))
            probabilities, chosen = output
            brought = controller._brought[targets.microbatch]
            rows = np.flatnonzero(brought.forced)
            used = [np.flatnonzero(row) for row in chosen.numpy()[rows]]
            right.append(bool((np.stack(used) == np.sort(brought.experts[rows, layer], axis=1)).all()))
            probabilities.register_hook(lambda _, one=targets.microbatch: calls.append(("backward", one, layer)))

        router.register_forward_hook(watch)
    whole = [np.arange(len(lesson.batch))]
    actor.update(InMemorySource.of(lesson.batch), TrainingSignal(advantages(), advantages(), whole))
    return calls, all(right) and bool(right)


def test_routes_are_of_the_microbatch_whose_forward_runs_beside_another_backward(world: World) -> None:
    ranks, sizes = OVERLAPPED["EP2"]
    for calls, right in run_ranks(called, ranks, str(world.path), sizes, world.lesson):
        layers = len({layer for _, _, layer in calls})
        microbatches = len({microbatch for _, microbatch, _ in calls})
        assert (layers > 1, microbatches > 1, right) == (True, True, True)
        forward = [[("forward", one, layer) for layer in range(layers)] for one in range(microbatches)]
        backward = [[("backward", one, layer) for layer in reversed(range(layers))] for one in range(microbatches)]
        beside = [
            call
            for ahead, behind in zip(forward[1:], backward, strict=False)
            for pair in zip(ahead, behind, strict=True)
            for call in pair
        ]
        assert calls == [*forward[0], *beside, *backward[-1]]
