"""When a function of the user's is to blame for what it could not score, and when a question may be."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence

from megatron_dppo.errors import UserError
from megatron_dppo.tasks.rewards.verdict import Verdict

_AT_FIRST, _LATER = 2, 8
"""Questions, all responses to which a function fails on, that stop a run: before it scored any response, and since."""


class Failures:
    """Of one function, over all calls of a run, which may come from several threads. A call may have one question
    alone, whose row of the data is bad: that never stops a run, however often it is asked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._enough = _AT_FIRST
        self._questions: set[int] = set()
        self._responses = 0

    @property
    def doubtful(self) -> frozenset[int]:
        """Questions that it failed on since it last scored a response."""
        with self._lock:
            return frozenset(self._questions)

    def trust(self) -> None:
        """It scored responses in a process before: what is left may be two bad rows, and is to come to an end."""
        with self._lock:
            self._enough = _LATER

    def count(self, name: str, questions: Collection[int], verdicts: Sequence[Verdict]) -> None:
        """Count the verdicts of a call, on responses to these questions. Raises UserError where there is nothing to
        learn from the reward `name`."""
        with self._lock:
            if any(not verdict.error for verdict in verdicts):
                self._enough, self._responses = _LATER, 0
                self._questions.clear()
            elif verdicts:
                self._questions |= set(questions)
                self._responses += len(verdicts)
                if len(self._questions) >= self._enough:
                    raise UserError(
                        f"the reward {name} failed on all {self._responses} responses to {len(self._questions)} "
                        f"questions: {verdicts[0].error}"
                    )
