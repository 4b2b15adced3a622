"""Episodes of several turns, whoever plays them: what a step gets of them, and what their turns are worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from megatron_dppo.actor.signal import Spans
from megatron_dppo.algorithm import AdvantageEstimator
from megatron_dppo.batch import RolloutBatch
from megatron_dppo.rollout.engine import Generates, SamplingConfig
from megatron_dppo.tasks.rewards.grader import Grader
from megatron_dppo.tasks.task import Prompt, Rewards
from megatron_dppo.trainer.requests import Draws


@dataclass(frozen=True)
class TurnReturns:
    """What was earned from each turn on, `n` turns of all episodes:
    `returns[t] = reward[t] + discount returns[t + 1]`."""

    sequence: np.ndarray
    """int64 `[n]`: of the batch, in order."""
    row: np.ndarray
    """int64 `[n]`: of the sequence: where the turn's first token is predicted; within a sequence they rise."""
    episode: np.ndarray
    """int64 `[n]`"""
    number: np.ndarray
    """int64 `[n]`: of the turn in its episode, from 0."""
    returns: np.ndarray
    """float32 `[n]`"""

    @staticmethod
    def of(turns: Sequence[tuple[int, int, int, int, float]]) -> TurnReturns:
        """Of (sequence, row, episode, number, return) each, in any order."""
        ordered = sorted(turns)
        place = np.array([turn[:4] for turn in ordered], dtype=np.int64).T
        returns = np.array([turn[4] for turn in ordered], dtype=np.float32)
        return TurnReturns(sequence=place[0], row=place[1], episode=place[2], number=place[3], returns=returns)

    def spans(self, samples: int, estimate: AdvantageEstimator) -> Spans:
        """Advantages: a turn is compared with the turns of the same number in the episodes of its group that came so
        far; the only one that did says nothing and gets 0, as a group of one does (see `group_advantages`)."""
        group = (self.episode // samples) * (int(self.number.max(initial=0)) + 1) + self.number
        advantages = estimate(torch.from_numpy(self.returns), torch.from_numpy(group))
        return Spans(self.sequence, self.row, advantages.numpy())


@dataclass(frozen=True)
class Episodes:
    """Finished episodes, in the order of the prompts and their samples."""

    batch: RolloutBatch
    """What they are trained on, episode by episode: a sequence for each that went straight on, several for one that
    branched, none for one without a token of the policy."""
    episode: np.ndarray
    """int64 `[B]`, number of the episode that each sequence belongs to; it rises."""
    rewards: Rewards
    """Of the episodes."""
    turns: np.ndarray
    """int64 `[E]`, turns of the policy."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """Metrics of whoever played them."""
    turn_returns: TurnReturns | None = None
    """Where tokens are trained with the rewards of their turn and those after it."""

    @property
    def cut(self) -> np.ndarray:
        """bool `[E]`: episodes of which a sequence was cut off."""
        return np.bincount(self.episode, self.batch.cut, minlength=len(self.turns)) > 0

    @property
    def metrics(self) -> dict[str, float]:
        """Those of all players, and `measured`."""
        others = self.batch.response_lengths - self.batch.sampled_per_sequence
        return {
            "episode/turns_mean": float(self.turns.mean()),
            "episode/environment_tokens_mean": float(others.sum() / len(self.turns)),
            **self.measured,
        }


class Player(Protocol):
    """Plays the episodes of a task of several turns: `task.kind: environment` or `agent`."""

    any_prompts: bool
    """Whether it plays prompts that are not its task's own, those of evaluation sets."""

    def play(
        self,
        engine: Generates,
        sampling: SamplingConfig,
        prompts: Sequence[Prompt],
        samples: int,
        draws: Draws,
        grader: Grader | None = None,
    ) -> Episodes:
        """`samples` episodes from each prompt; may be called from several threads. An episode that fails keeps the
        rewards that it has and is counted. `grader` scores answers, where it is not the task's own. Raises UserError
        where all fail, and what the engine raises."""
        ...

    def close(self) -> None:
        """End what was started to play."""
        ...
