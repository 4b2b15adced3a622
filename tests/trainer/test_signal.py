"""What a step teaches: which answers are trained on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_dppo.config.schema import AlgorithmConfig
from megatron_dppo.config.trainer import TrainerConfig
from megatron_dppo.errors import UserError
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.stored import columns_of
from megatron_dppo.trainer.rollouts import Experience
from tests.batch.rollouts import random_batch

REWARDS = np.array([1, 0, 0, 1, 1, 1, 0, 0], dtype=np.float32)


def experience(cut: list[int]) -> Experience:
    batch = random_batch(3, [2] * 8, [3] * 8, 4)
    handle, _ = columns_of(batch, store="none", key="none", layer_groups=None)
    reasons = tuple("length" if b in cut else "stop" for b in range(8))
    object.__setattr__(handle, "finish_reasons", reasons)
    return Experience(handle, REWARDS, {}, ())


def config(overlong_filter: bool) -> Any:
    return SimpleNamespace(
        trainer=TrainerConfig(prompts_per_step=4, samples_per_prompt=2, prompts_per_mini_batch=2),
        algorithm=AlgorithmConfig(overlong_filter=overlong_filter),
        rollout=RolloutConfig(),
    )


def test_the_overlong_filter_leaves_cut_answers_out_but_not_out_of_the_baseline() -> None:
    everything = experience([1, 4]).signal(config(False))
    filtered = experience([1, 4]).signal(config(True))
    assert [b.tolist() for b in everything.mini_batches] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [b.tolist() for b in filtered.mini_batches] == [[0, 2, 3], [5, 6, 7]]
    np.testing.assert_array_equal(filtered.advantages, everything.advantages)


def test_a_penalty_is_part_of_the_reward_before_the_baseline() -> None:
    """R - penalty, of groups of two: half the difference."""
    penalties = np.array([0.2, 0, 0, 0, 0.1, 0.3, 0, 0])
    signal = experience([]).signal(config(False), penalties)
    np.testing.assert_allclose(signal.advantages, [0.4, -0.4, -0.5, 0.5, 0.1, -0.1, 0, 0], atol=1e-7)
    np.testing.assert_array_equal(signal.returns, REWARDS)
    plain = experience([]).signal(config(False))
    np.testing.assert_array_equal(experience([]).signal(config(False), np.zeros(8)).advantages, plain.advantages)


def test_a_mini_batch_of_cut_answers_is_no_gradient_step_and_a_step_of_them_is_refused() -> None:
    assert [b.tolist() for b in experience([4, 5, 6, 7]).signal(config(True)).mini_batches] == [[0, 1, 2, 3]]
    with pytest.raises(UserError, match=r"every answer was cut at rollout.max_response_tokens=16384"):
        experience(list(range(8))).signal(config(True))
