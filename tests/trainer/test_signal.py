"""What a step teaches: which answers are trained on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_dppo.config.schema import AlgorithmConfig
from megatron_dppo.config.trainer import TrainerConfig
from megatron_dppo.errors import UserError
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.stored import columns_of
from megatron_dppo.tasks.task import Rewards
from megatron_dppo.trainer.episodes import Episodes, TurnReturns
from megatron_dppo.trainer.rollouts import Experience, group_metrics
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


def played(**changes: Any) -> Experience:
    """Two prompts with two episodes each, which have 1, 2, 0 and 5 of the eight sequences."""
    episode = np.array([0, 1, 1, 3, 3, 3, 3, 3])
    return replace(experience([]), rewards=np.array([1, 0, 0, 3], dtype=np.float32), episode=episode, **changes)


def small(**algorithm: Any) -> Any:
    made = config(False)
    made.trainer = TrainerConfig(prompts_per_step=2, samples_per_prompt=2, prompts_per_mini_batch=1)
    made.algorithm = AlgorithmConfig(**algorithm)
    return made


def test_baselines_are_over_episodes_and_mini_batches_count_prompts() -> None:
    signal = played().signal(small())
    np.testing.assert_allclose(signal.advantages, [0.5, -0.5, -0.5, 1.5, 1.5, 1.5, 1.5, 1.5])
    np.testing.assert_array_equal(signal.returns, [1, 0, 0, 3, 3, 3, 3, 3])
    assert [b.tolist() for b in signal.mini_batches] == [[0, 1, 2], [3, 4, 5, 6, 7]]
    assert [signal.episodes_of(b) for b in signal.mini_batches] == [2, 1]
    trained = np.array([3, 1, 2, 1, 1, 1, 1, 1])
    assert signal.trained_of_episode(trained).tolist() == [3, 3, 3, 5, 5, 5, 5, 5]


def test_a_penalty_of_an_episode_is_that_of_all_its_sequences() -> None:
    penalties = np.array([0, 0.1, 0.3, 0, 0, 0, 0, 1.0])
    signal = played().signal(small(), penalties)
    np.testing.assert_allclose(signal.advantages, [0.7, -0.7, -0.7, 1, 1, 1, 1, 1], atol=1e-6)


def test_an_episode_with_one_sequence_cut_is_left_out_whole() -> None:
    cut = played()
    object.__setattr__(cut.handle, "finish_reasons", ("stop", "length", *["stop"] * 6))
    assert [b.tolist() for b in cut.signal(small(overlong_filter=True)).mini_batches] == [[0], [3, 4, 5, 6, 7]]


def test_turns_are_compared_with_the_turns_of_their_number() -> None:
    turns = TurnReturns(
        sequence=np.array([0, 0, 1, 2, 3]),
        row=np.array([4, 9, 4, 6, 2]),
        episode=np.array([0, 0, 1, 1, 3]),
        number=np.array([0, 1, 0, 1, 0]),
        returns=np.array([2, 1, 0, 3, 5], dtype=np.float32),
    )
    spans = played(turn_returns=turns).signal(small()).spans
    assert spans is not None
    np.testing.assert_allclose(spans.advantage, [1, -1, -1, 1, 0])  # the last has no other turn 0 in its group
    sequence = torch.tensor([0, 0, 0, 1, 1, 2, 3])
    row = torch.tensor([4, 8, 9, 4, 100, 6, 2])
    np.testing.assert_allclose(spans.on(sequence.device)(sequence, row), [1, 1, -1, -1, -1, 1, 0])


def test_advantages_may_be_ones_own(tmp_path: Path) -> None:
    """Of answers and of turns: a function of all rewards and their groups, with a penalty subtracted before."""
    own = tmp_path / "own.py"
    own.write_text("def total(rewards, groups): return 10 * groups + rewards - rewards.sum()\n")
    made = config(False)
    made.algorithm = AlgorithmConfig(advantage=f"{own}:total")
    penalties = np.array([0.5, *[0] * 7])
    signal = experience([]).signal(made, penalties)
    np.testing.assert_allclose(signal.advantages, [-3, -3.5, 6.5, 7.5, 17.5, 17.5, 26.5, 26.5])
    assert signal.advantages.dtype == np.float32
    turns = TurnReturns.of([(0, 4, 0, 0, 2.0), (1, 4, 1, 0, 0.0), (2, 6, 1, 1, 3.0)])
    spans = played(turn_returns=turns).signal(small(advantage=f"{own}:total")).spans
    assert spans is not None
    np.testing.assert_allclose(spans.advantage, [-3, -5, 8])  # turn 1 of the group is a group of its own


def test_groups_that_teach_nothing_are_counted() -> None:
    """Of four groups of two one is all right, one not at all though its rewards differ, and one has equal rewards."""
    reward = np.array([1, 1, 0.2, 0, 0, 1, 0.5, 0.5], dtype=np.float32)
    rewards = Rewards(reward=reward, correct=reward >= 1, well_formed=reward > 0)
    assert group_metrics(rewards, 2) == {
        "reward/equal_groups_fraction": 0.5,
        "reward/solved_groups_fraction": 0.25,
        "reward/unsolved_groups_fraction": 0.5,
    }


def test_an_episode_is_cut_off_once_however_many_sequences_it_has() -> None:
    """Of three episodes the first has three sequences, two of which are cut off, and the second none."""
    batch = replace(random_batch(3, [2] * 4, [3] * 4, 4), finish_reasons=("stop", "length", "length", "stop"))
    rewards = Rewards(reward=np.zeros(3), correct=np.zeros(3, bool), well_formed=np.zeros(3, bool))
    episodes = Episodes(batch, np.array([0, 0, 0, 2]), rewards, np.array([3, 0, 1]))
    assert episodes.cut.tolist() == [True, False, False]
    assert batch.cut.tolist() == [False, True, True, False]
