"""What a reward is given and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Answered:
    """One response to one question."""

    question: str
    reference: str
    """The reference answer."""
    also_accepted: tuple[str, ...] = ()
    """Other reference answers that are as good."""
    response: str = field(repr=False)
    """Everything the policy wrote, without special tokens."""
    answer: str | None
    """The group `answer` of `task.answer_pattern`; None where the response does not match it."""
    tokens: int | None = None
    """Length of the response; None where nobody counted."""
    truncated: bool = False
    """The response was cut off at its longest."""
    metadata: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A score, and whether it could be given. `error` says why a response was not scored; its score is 0 then."""

    score: float
    well_formed: bool = True
    """The response has an answer that the reward could read."""
    error: str = ""
    timed_out: bool = False
