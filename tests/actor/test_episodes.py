"""Sequences that are one episode to the loss, and advantages that change within sequences: the loss of a step, summed
by hand from what the weights say before it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.actor.conftest import World
from tests.actor.matrix import LAYOUTS, Case, Lesson, build_actor
from tests.distributed import run_ranks

EPISODE = np.array([0, 0, 0, 1, 2, 2, 4, 4, 5, 6, 6, 6])  # the third has no sequence


def spans_of(lesson: Lesson) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two parts of each sequence: from its prompt's end, and from two rows later."""
    sequence = np.repeat(np.arange(len(lesson.batch)), 2)
    row = np.stack([lesson.batch.prompt_lengths - 1, lesson.batch.prompt_lengths + 1], axis=1).ravel().astype(np.int64)
    advantage = np.linspace(-1, 1, len(sequence)).astype(np.float32)
    return sequence, row, advantage


def step(rank: int, path: str, layout: dict, lesson: Lesson, with_spans: bool) -> tuple[np.ndarray, float, float]:
    """Tokens as the weights see them before the step, its loss, and the surrogate of its rewards."""
    from megatron_dppo.actor.signal import Spans, TrainingSignal
    from megatron_dppo.batch import InMemorySource

    actor = build_actor(path, layout, Case("pg-is"))
    source = InMemorySource.of(lesson.batch)
    tokens = actor.parity(source, replay=True, keep=100_000).tokens
    everything, spans = [np.arange(len(lesson.batch))], Spans(*spans_of(lesson)) if with_spans else None
    signal = TrainingSignal(lesson.advantages, lesson.advantages, everything, episode=EPISODE, spans=spans)
    metrics = actor.update(source, signal).metrics
    return tokens, metrics["optimizer/loss"], metrics["policy/surrogate"]


@pytest.mark.parametrize("layout", ["1 rank", "CP2"])
def test_the_loss_averages_over_episodes_and_takes_the_advantage_of_each_row(world: World, layout: str) -> None:
    ranks, sizes = LAYOUTS[layout]
    lesson = world.lesson
    assert len(lesson.batch) == len(EPISODE)
    found = [run_ranks(step, ranks, str(world.path), sizes, lesson, spans)[0] for spans in (False, True)]
    tokens, losses = found[0][0], [loss for _, loss, _ in found]
    mu, pi = tokens[:, 0].astype(np.float64), tokens[:, 1].astype(np.float64)
    sequence, row = tokens[:, 3].astype(int), tokens[:, 4].astype(int)
    first, second = spans_of(lesson)[2].reshape(-1, 2).T
    of_span = np.where(row >= lesson.batch.prompt_lengths[sequence] + 1, second[sequence], first[sequence])
    assert len(set(of_span)) > len(lesson.batch)
    sums = [-(np.exp(pi - mu) * advantage).sum() for advantage in (lesson.advantages[sequence], of_span)]
    constant = sums[0] / (len(np.unique(EPISODE)) * losses[0])
    assert constant == pytest.approx(round(constant), rel=1e-4)  # the normaliser, in tokens
    assert losses[1] == pytest.approx(sums[1] / (len(np.unique(EPISODE)) * round(constant)), rel=1e-4)
    rewards = lesson.advantages[sequence]  # of an episode: Eq. 5 is a mean over those
    surrogate = (rewards * (np.exp(pi - mu) - 1)).sum() / len(np.unique(EPISODE))
    assert [of for _, _, of in found] == pytest.approx([surrogate] * 2, rel=1e-4)
