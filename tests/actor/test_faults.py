"""Rollouts and ranks that go wrong."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import numpy as np
import pytest

from megatron_dppo.actor.packing import SequenceTooLongError
from megatron_dppo.batch import RolloutBatch
from megatron_dppo.router_replay.routes import Routes
from tests.actor.conftest import World
from tests.actor.matrix import LAYOUTS, Case, Lesson, build_actor, exported, train_cases
from tests.actor.reference import compare_training, expected_training
from tests.distributed import PATIENCE_S, run_ranks


def one_token(batch: RolloutBatch) -> RolloutBatch:
    """A sequence of a single prompt token, which predicts nothing and was never routed."""
    assert batch.routes is not None
    return replace(
        batch.select([0]),
        token_ids=np.array([5], dtype=np.int32),
        offsets=np.array([0, 1]),
        prompt_lengths=np.array([1], dtype=np.int32),
        loss_mask=np.array([False]),
        mu_logp=np.zeros(1, dtype=np.float32),
        topk_ids=np.full((1, batch.topk_ids.shape[1]), -1, dtype=np.int32),
        topk_logp=np.full((1, batch.topk_ids.shape[1]), -np.inf, dtype=np.float32),
        routes=Routes(np.zeros((1, *batch.routes.experts.shape[1:]), np.uint8), np.zeros(1, bool), 8),
        request_ids=("0/one/0",),
        weight_versions=np.zeros(1, dtype=np.int32),
    )


@pytest.fixture(scope="module")
def odd(world: World) -> Lesson:
    """Twelve ordinary sequences, one of one token, and one without a token to train on."""
    batch = world.lesson.batch
    untrained = batch.select([4])
    untrained = replace(untrained, loss_mask=np.zeros_like(untrained.loss_mask), request_ids=("0/none/0",))
    whole = RolloutBatch.concatenate([batch, one_token(batch), untrained])
    return Lesson(whole, np.append(world.lesson.advantages, [1.0, -1.0]), [[np.arange(14)], [np.array([13, 12, 3])]])


@pytest.mark.parametrize("layout", ["1 rank", "DP2", "CP2", "TP2 PP2 EP2"])
def test_a_token_alone_and_a_microbatch_without_any_to_train(world: World, odd: Lesson, layout: str) -> None:
    """Under a budget of 20 nearly every sequence is a microbatch, and under a budget of 6 each sequence longer than
    that is one ("alone"); in the second step one data-parallel rank has nothing to train at all."""
    history, weights = expected_training(world.model, odd, "dppo-binary-tv", replay=True)
    cases = [Case(budget=20), Case(budget=6, long_sequences="alone"), Case(budget=500)]
    ranks, sizes = LAYOUTS[layout]
    results = run_ranks(train_cases, ranks, str(world.path), sizes, odd, cases)
    for case, got in zip(cases, results[0], strict=True):
        compare_training(got, history, weights, odd.updates, f"budget {case.budget}")


def refused(rank: int, path: str, lesson: Lesson) -> str:
    try:
        train_cases(rank, path, {}, lesson, [Case(budget=15)])
    except SequenceTooLongError as error:
        return str(error)
    return "accepted"


def test_a_sequence_over_the_budget_is_refused_on_all_ranks(world: World) -> None:
    for message in run_ranks(refused, 2, str(world.path), world.lesson):
        assert "actor.max_tokens_per_microbatch (now 15)" in message
        assert "actor.long_sequences=alone" in message


def poisoned(rank: int, path: str, layout: dict, lesson: Lesson, victim: int) -> tuple[list, bool, str]:
    """Two updates with a NaN among this rank's advantages, then a healthy one; then NaNs until the run stops."""
    from megatron_dppo.actor.actor import NonFiniteTraining, TrainingSignal
    from megatron_dppo.batch import InMemorySource

    actor = build_actor(path, layout, Case())
    bad = lesson.advantages.copy()
    if rank == victim:
        bad[3] = np.nan
    before = exported(actor)
    metrics = []

    def update(advantages: np.ndarray) -> None:
        mini_batches = [np.arange(12)]
        signal = TrainingSignal(advantages, np.nan_to_num(advantages), mini_batches)
        metrics.append(actor.update(InMemorySource.of(lesson.batch), signal).metrics)

    update(bad)
    update(bad)
    unchanged = all(np.array_equal(tensor, before[name]) for name, tensor in exported(actor).items())
    update(lesson.advantages)
    try:
        for _ in range(4):
            update(bad)
    except NonFiniteTraining as error:
        return metrics, unchanged, str(error)
    return metrics, unchanged, "went on"


@pytest.mark.parametrize(("layout", "victim"), [("1 rank", 0), ("TP2 PP2 EP2", 2), ("CP2", 0)])
def test_a_nan_among_one_ranks_rewards_skips_the_step_and_stops_in_the_end(
    world: World, layout: str, victim: int
) -> None:
    ranks, sizes = LAYOUTS[layout]
    results = run_ranks(poisoned, ranks, str(world.path), sizes, world.lesson, victim)
    for metrics, unchanged, message in results:
        assert unchanged
        assert [m["optimizer/skipped_steps"] for m in metrics] == [1, 1, 0, 1, 1, 1]
        assert np.isfinite(metrics[2]["optimizer/loss"])
        assert "4 gradient steps in a row were not finite (actor.max_skipped_steps=3)" in message
    assert "sequence 3 row" in results[victim][2]


def dies(rank: int, path: str, layout: dict, lesson: Lesson, victim: int) -> None:
    from megatron_dppo.actor import actor as module
    from megatron_dppo.actor.actor import TrainingSignal
    from megatron_dppo.batch import InMemorySource

    actor = build_actor(path, layout, Case(budget=20))
    inner = actor.chunks[0].module.decoder.layers[-1].mlp
    calls = []

    def killed(*_: object) -> None:
        calls.append(1)
        if rank == victim and len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    inner.register_forward_pre_hook(killed)
    assert module.MegatronActor is type(actor)
    actor.update(InMemorySource.of(lesson.batch), TrainingSignal(lesson.advantages, lesson.advantages, [np.arange(12)]))


@pytest.mark.parametrize("layout", ["PP2", "TP2 EP2"])
def test_a_rank_killed_in_mid_step_ends_the_others(world: World, layout: str) -> None:
    ranks, sizes = LAYOUTS[layout]
    started = time.monotonic()
    with pytest.raises(AssertionError, match=r"died|closed|reset|Connection|failed"):
        run_ranks(dies, ranks, str(world.path), sizes, world.lesson, 1, timeout=PATIENCE_S)
    assert time.monotonic() - started < 200, "the others waited for the dead rank"
