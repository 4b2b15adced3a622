"""The verifier of a reasoning-gym dataset, for a worker process."""

from __future__ import annotations

import importlib
import math
import warnings
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from megatron_dppo.tasks.rewards.verdict import Answered, Verdict


@dataclass(frozen=True)
class GymJudge:
    """The dataset's own score in [0, 1]. Some verifiers evaluate what the policy wrote (countdown and puzzle24 give it
    to sympy's parser, which runs any Python): it may not end, and has no place in the trainer's process."""

    dataset: str
    parameters: dict[str, Any] = field(default_factory=dict)
    """Of the dataset, seed and size among them."""

    def prepare(self) -> None:
        """Import what takes seconds, before the clock of the first answer runs."""
        _dataset(self)

    def __call__(self, item: Answered) -> Verdict:
        """That a verifier fails depends on what the policy writes and must not end a run."""
        if item.answer is None:
            return Verdict(score=0.0, well_formed=False)
        entry = {"question": item.question, "answer": item.reference, "metadata": dict(item.metadata)}
        try:
            score = float(_dataset(self).score_answer(item.answer, entry))
        except Exception as error:
            return Verdict(score=0.0, error=f"the verifier of {self.dataset} on {item.answer!r:.200}: {error!r}")
        if not math.isfinite(score):
            return Verdict(score=0.0, error=f"the verifier of {self.dataset} scored {item.answer!r:.200} {score}")
        return Verdict(score=score)


_made: dict[str, Any] = {}


def _dataset(judge: GymJudge) -> Any:
    key = repr(judge)
    if key not in _made:
        _made[key] = gym_factory().create_dataset(judge.dataset, **judge.parameters)
    return _made[key]


def gym_factory() -> ModuleType:
    """reasoning-gym's module that knows and makes its datasets; imported when it is needed, which takes seconds."""
    with warnings.catch_warnings():
        # A dependency of the library has a doubtful comparison in its source, reported on first import.
        warnings.simplefilter("ignore", SyntaxWarning)
        return importlib.import_module("reasoning_gym.factory")
