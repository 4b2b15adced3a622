"""Which tokens the trust region blocked, row by row."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_dppo.algorithm import presets
from tests.actor.conftest import World
from tests.actor.matrix import LAYOUTS, OVERRIDES, Case, Lesson, build_actor
from tests.distributed import run_ranks

WATCHED = [1, 4, 5, 10]


def watch(rank: int, path: str, layout: dict, lesson: Lesson) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Tokens as the weights saw them before the update, and what it says of them."""
    from megatron_dppo.actor.actor import TrainingSignal
    from megatron_dppo.batch import InMemorySource

    actor = build_actor(path, layout, Case("dppo-binary-tv"))
    source = InMemorySource.of(lesson.batch)
    tokens = actor.parity(source, replay=True, keep=100_000).tokens
    signal = TrainingSignal(lesson.advantages, lesson.advantages, [np.arange(len(lesson.batch))])
    report = actor.update(source, signal, look=WATCHED)
    assert report.masked_counts is not None
    return tokens, report.watched, report.masked_counts.numpy(), report.metrics["policy/tokens"]


@pytest.mark.parametrize("layout", ["1 rank", "DP2", "CP2", "TP2 PP2 EP2"])
def test_every_row_of_a_watched_sequence_is_reported_as_the_paper_masks_it(world: World, layout: str) -> None:
    ranks, sizes = LAYOUTS[layout]
    results = run_ranks(watch, ranks, str(world.path), sizes, world.lesson)
    tokens, watched, counts, trained = results[0]
    for other in results[1:]:
        assert np.array_equal(other[1], watched)
        assert np.array_equal(other[2], counts)
    preset = presets.get("dppo-binary-tv", **OVERRIDES.get("dppo-binary-tv", {}))
    mu, pi = np.exp(tokens[:, 0].astype(np.float64)), np.exp(tokens[:, 1].astype(np.float64))
    sequence, row = tokens[:, 3].astype(int), tokens[:, 4].astype(int)
    advantage = world.lesson.advantages[sequence]
    away = np.where(advantage > 0, pi > mu, pi < mu)  # Eq. 12
    threshold = np.where(advantage > 0, preset.threshold_positive, preset.threshold_negative)
    blocked = away & (np.abs(pi - mu) > threshold) & (advantage != 0)
    assert len(tokens) == trained
    assert 0 < blocked.sum() < trained
    expected = np.stack([sequence, row, blocked], axis=1)[np.isin(sequence, WATCHED)]
    assert np.array_equal(watched, expected[np.lexsort((expected[:, 1], expected[:, 0]))])
    ids = tokens[:, 2].astype(int)
    for sign, chosen in enumerate((advantage > 0, advantage < 0)):
        assert np.array_equal(counts[sign], np.bincount(ids[blocked & chosen], minlength=counts.shape[1]))
