"""Several passes over a rollout, against the same training written with transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.actor.matrix import (
    LAYOUTS,
    SHAPE,
    TEMPERATURE,
    Case,
    Lesson,
    advantages,
    build_actor,
    exported,
)
from tests.actor.reference import by_hf_name, compare_metrics, expected_training, make_rollout
from tests.distributed import run_ranks
from tests.tiny import tiny_qwen3_moe

EPOCHS = 2
MINI_BATCHES = [np.arange(0, 7), np.arange(7, 12)]


def train_on_rank(
    rank: int, path: str, layout: dict, lesson: Lesson, preset: str
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    from megatron_dppo.actor.actor import TrainingSignal
    from megatron_dppo.batch import InMemorySource

    actor = build_actor(path, layout, Case(preset))
    signal = TrainingSignal(lesson.advantages, lesson.advantages, MINI_BATCHES, EPOCHS)
    return actor.update(InMemorySource.of(lesson.batch), signal).metrics, exported(actor)


@pytest.mark.parametrize(("preset", "layout"), [("dppo-binary-tv", "1 rank"), ("minirl", "TP2 EP2")])
def test_two_epochs_equal_transformers(tmp_path: Path, preset: str, layout: str) -> None:
    """mu stays the rollout's, and a recomputed anchor that of the policy before the first pass."""
    model = tiny_qwen3_moe(tmp_path, seed=3)
    model.model.embed_tokens.padding_idx = None  # transformers would not train the row of the padding token
    batch = make_rollout(model, seed=19, temperature=TEMPERATURE, **SHAPE)
    lesson = Lesson(batch, advantages(), [MINI_BATCHES * EPOCHS])
    history, expected = expected_training(model, lesson, preset, True)
    ranks, sizes = LAYOUTS[layout]
    metrics, weights = run_ranks(train_on_rank, ranks, str(tmp_path), sizes, lesson, preset)[0]
    assert len(history) == 4
    compare_metrics(metrics, history)
    assert metrics["policy/tokens"] == EPOCHS * batch.loss_mask.sum()
    assert metrics["data/trained_tokens"] == EPOCHS * batch.lengths.sum()
    assert len(weights) > 100
    for name, tensor in weights.items():
        np.testing.assert_allclose(tensor, by_hf_name(expected, name), atol=2e-6, rtol=0, err_msg=name)
    if preset == "minirl":  # an anchor that moved between the passes would have given other weights
        _, moved = expected_training(model, Lesson(batch, advantages(), [MINI_BATCHES] * EPOCHS), preset, True)
        assert max(np.abs(by_hf_name(moved, name) - tensor).max() for name, tensor in weights.items()) > 1e-4
