"""One tiny model of a family and one rollout of it, for all tests of the actor."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel

from tests.actor.matrix import SHAPE, TEMPERATURE, UPDATES, Lesson, advantages
from tests.actor.reference import expected_training, make_rollout
from tests.tiny import tiny_model

SEEDS = {"glm4_moe": 12, "qwen3_5_moe": 7}
"""Of models that are too close to a tie with the usual seed, or too steep for float32."""


@dataclass(frozen=True)
class World:
    """The rollout everybody trains on, and what training it should give."""

    path: Path
    model: PreTrainedModel
    lesson: Lesson
    expected: Callable[[str, bool], tuple[list, dict[str, np.ndarray]]]
    """(preset, replay) to (loss, norm and gradients of each step, weights after all)."""


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], World]:
    """The world of a model type."""

    @functools.cache
    def make(family: str) -> World:
        path = tmp_path_factory.mktemp(family)
        model = tiny_model(family, path, seed=SEEDS.get(family, 3))
        model.model.embed_tokens.padding_idx = None  # transformers would not train the row of the padding token
        lesson = Lesson(make_rollout(model, seed=4, temperature=TEMPERATURE, **SHAPE), advantages(), UPDATES)

        @functools.cache
        def expected(preset: str, replay: bool) -> tuple[list, dict[str, np.ndarray]]:
            return expected_training(model, lesson, preset, replay)

        return World(path, model, lesson, expected)

    return make


@pytest.fixture(scope="session")
def world(worlds: Callable[[str], World]) -> World:
    return worlds("qwen3_moe")
