"""A reward function of the user's, found by its import path, for a worker process."""

from __future__ import annotations

import math
import numbers
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_dppo.launch.imports import load_callable
from megatron_dppo.tasks.rewards.verdict import Answered, Verdict


@dataclass(frozen=True)
class CustomVerifier:
    """`path` is `package.module:callable` or `file.py:callable`, see `PythonReward`; modules and files are looked for
    in `folder` first."""

    path: str
    folder: str = field(default_factory=os.getcwd)

    evaluates = True
    """For all that is known of it."""

    @property
    def file(self) -> Path | None:
        name, _, _ = self.path.rpartition(":")
        return Path(self.folder, name).resolve() if name.endswith(".py") else None

    def prepare(self) -> None:
        """Raises UserError where there is no such callable."""
        if self.folder not in sys.path:
            sys.path.insert(0, self.folder)
        self._function()

    def _function(self) -> Callable[..., Any]:
        return load_callable(self.path, named="the reward ", folder=self.folder)

    def __call__(self, item: Answered) -> Verdict:
        """A function that raises or returns no finite number gives no score; the response may be to blame, so that is
        counted."""
        function = self._function()
        try:
            score = function(
                question=item.question,
                reference=item.reference,
                response=item.response,
                answer=item.answer,
                metadata=dict(item.metadata),
            )
        except Exception as error:
            return Verdict(score=0.0, error=f"{self.path} raised {type(error).__name__}: {error}")
        if not isinstance(score, numbers.Real):
            said = f"{self.path} returned {score!r:.60} ({type(score).__name__}) for the question {item.question!r:.60}"
            return Verdict(score=0.0, error=f"{said}; it must return a number")
        if not math.isfinite(score):
            return Verdict(score=0.0, error=f"{self.path} returned {float(score)}")
        return Verdict(score=float(score))
