"""What the trainer may ask of a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

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
    metadata: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Whatever else the verifier needs."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rewards:
    """The verdicts on `N` responses, in their order."""

    reward: np.ndarray
    """float32 `[N]`, the verifier's score; 0 for malformed responses."""
    correct: np.ndarray
    """bool `[N]`: full score."""
    well_formed: np.ndarray
    """bool `[N]`: the response has the wanted form, so that an answer could be read from it."""
    verifier_errors: int = 0
    """Responses on which the verifier itself failed (raised, or gave no finite number); their reward is 0."""

    def __len__(self) -> int:
        return len(self.reward)


class Task(Protocol):
    """Prompts and their verifier. Everything is a function of the configuration and the tokenizer, so any process that
    builds the task sees the same prompts under the same numbers."""

    @property
    def epoch_size(self) -> int:
        """Distinct training questions."""
        ...

    @property
    def held_out_size(self) -> int:
        """Distinct held-out questions."""
        ...

    @property
    def fingerprint(self) -> str:
        """Changes when the prompts or their order change; a resumed run compares it."""
        ...

    def prompts(self, start: int, count: int) -> list[Prompt]:
        """Training prompts at positions `start` to `start + count` of the endless stream: epoch after epoch, each a
        permutation of the training questions drawn from (seed, epoch). Any position may be asked for at any time."""
        ...

    def held_out(self, count: int) -> list[Prompt]:
        """The first `count` held-out prompts. Raises UserError if there are fewer."""
        ...

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> Rewards:
        """Judge `responses[i]` as a response to `prompts[i]`; the text has no special tokens."""
        ...
