"""One question, and the verdicts on its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True, eq=False)
class Prompt:
    """One question, ready for the engine and, after the response, for the verifier."""

    index: int
    """The question's number in its task: the same question has the same number in every epoch, and training and
    held-out questions share one numbering."""
    prompt_ids: np.ndarray = field(repr=False)
    """Token ids `[tokens]`, int32, chat template and opening of the assistant's turn included."""
    text: str
    """What `prompt_ids` spell."""
    question: str
    """The question as the dataset words it."""
    answer: str
    """The reference answer."""
    also_accepted: tuple[str, ...] = ()
    """Other reference answers that are as good."""
    metadata: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Whatever else the verifier needs."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rewards:
    """The verdicts on `N` responses, in their order."""

    reward: np.ndarray
    """float32 `[N]`, what is trained on: the weighted sum of the task's rewards."""
    correct: np.ndarray
    """bool `[N]`: full score of the first reward that is for the question."""
    well_formed: np.ndarray
    """bool `[N]`: the response has the wanted form, so that an answer could be read from it."""
    verifier_errors: int = 0
    """Responses on which a reward itself failed (raised, gave no finite number, took too long); it gave them 0."""
    parts: Mapping[str, np.ndarray] = field(default_factory=dict)
    """float32 `[N]` of each reward by name, before its weight; not a number where it is not for the question."""
    errors: Mapping[str, int] = field(default_factory=dict)
    """Responses each reward could not score."""
    timeouts: Mapping[str, int] = field(default_factory=dict)
    """Those of them that took too long."""

    def __len__(self) -> int:
        return len(self.reward)

    def differ(self, samples: int) -> np.ndarray:
        """bool `[prompts]`: whether the `samples` answers to a prompt have different rewards."""
        reward = self.reward.reshape(-1, samples)
        return np.asarray(reward.max(axis=1) > reward.min(axis=1))

    def select(self, rows: Sequence[int]) -> Rewards:
        """Of these responses, in this order. The counts of what failed stay those of all."""
        return replace(
            self,
            reward=self.reward[rows],
            correct=self.correct[rows],
            well_formed=self.well_formed[rows],
            parts={name: scores[rows] for name, scores in self.parts.items()},
        )

    @staticmethod
    def concatenate(several: Sequence[Rewards]) -> Rewards:
        """Of all responses, in order."""
        first = several[0]
        return Rewards(
            reward=np.concatenate([one.reward for one in several]),
            correct=np.concatenate([one.correct for one in several]),
            well_formed=np.concatenate([one.well_formed for one in several]),
            verifier_errors=sum(one.verifier_errors for one in several),
            parts={name: np.concatenate([one.parts[name] for one in several]) for name in first.parts},
            errors={name: sum(one.errors[name] for one in several) for name in first.errors},
            timeouts={name: sum(one.timeouts[name] for one in several) for name in first.timeouts},
        )
