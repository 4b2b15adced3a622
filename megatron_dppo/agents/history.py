"""The turns of a session as a tree of stored ids, and the training samples that come of it.

```
a request's messages:   system user1 | answer1 tool | answer2 user2      the longest known history it begins with
turns:                  turn 0 ──────► turn 1 ──────► (new turn)         keeps its STORED ids; the rest is rendered
                            └── tool's answer edited: turn 2, a branch, a training sample of its own
```
A turn goes on with the branch whose last turn it follows, unless another answer is under way there; else it begins a
branch, in which everything before it is context. So every sampled token is in the loss mask of one branch, whatever the
harness does to its history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megatron_dppo.agents.messages import Message, digests
from megatron_dppo.batch import RolloutBatch, join_turns


@dataclass(frozen=True, kw_only=True)
class TurnRecord:
    """One answer of the policy."""

    number: int
    asked: tuple[Message, ...]
    """The messages that the request had after those of the turn before; empty for a request of ids."""
    answer: Message | None
    started: float
    """`time.monotonic()` when the engines were asked."""
    ended: float
    """And when the last token was there."""
    prompt: int
    """Tokens before the answer in its branch, so the row of its first sampled token."""
    sampled: int
    """Tokens of it."""
    finish_reason: str
    """"stop", "length"."""
    why_not: str
    """Why it is not trained on, or empty."""
    rendered_anew: str
    """Why the history was rendered although the session had turns before; empty where stored ids went on."""
    branch: int = -1
    """Number in `SessionRecord.branches`; -1 where that has no turn that is trained on."""
    retries: int = 0
    """Requests for it that came again and got the same answer."""

    @property
    def trained(self) -> bool:
        return not self.why_not


@dataclass(eq=False)
class Branch:
    ids: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    """Of all of it, trained on or not."""
    parts: list[RolloutBatch] = field(default_factory=list)
    """The turns that are trained on, each beyond what those before it have."""
    recorded: int = 0
    """Tokens that they have."""
    reason: str = ""
    """Why the last of them ended."""
    last: Turn | None = None
    under_way: bool = False
    """Whether an answer is that will go on with it."""


@dataclass(eq=False)
class Turn:
    """An answer and its place."""

    record: TurnRecord
    branch: Branch
    length: int
    """Tokens of the branch up to its end."""
    closed: bool
    """Whether the model ended it by a stop token."""
    messages: tuple[Message, ...] | None
    """Of the whole conversation up to it, its own included; None where ids were asked for."""

    @property
    def ids(self) -> np.ndarray:
        return self.branch.ids[: self.length]

    @property
    def is_last(self) -> bool:
        return self.branch.last is self


class History:
    """Not for several threads at once."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.turns: list[Turn] = []
        self._branches: list[Branch] = []
        self._known: dict[bytes, list[Turn]] = {}

    def longest(self, root: Any, messages: Sequence[Message]) -> Turn | None:
        """The turn whose conversation is the longest beginning of `messages`; of several the last. `root` is JSON that
        conversations must share: tools, variables of the template."""
        known = digests(root, messages)
        for length in range(len(messages), 0, -1):
            for turn in reversed(self._known.get(known[length], ())):
                assert turn.messages is not None
                if all(mine.same_reasoning(sent) for mine, sent in zip(turn.messages, messages, strict=False)):
                    return turn
        return None

    def longest_ids(self, ids: np.ndarray) -> Turn | None:
        """The turn whose ids are the longest beginning of `ids`."""
        fits = [t for t in self.turns if t.length <= len(ids) and np.array_equal(t.ids, ids[: t.length])]
        return max(fits, key=lambda turn: (turn.length, turn.record.number), default=None)

    def branch_for(self, before: Turn | None) -> Branch:
        """The branch of an answer that is to be drawn after this turn, `under_way` until its caller says otherwise."""
        goes_on = before is not None and before.is_last and not before.branch.under_way
        branch = before.branch if before is not None and goes_on else Branch()
        branch.under_way = True
        return branch

    def add(
        self,
        branch: Branch,
        record: TurnRecord,
        prompt: np.ndarray,
        batch: RolloutBatch,
        *,
        closed: bool,
        root: Any = None,
        messages: tuple[Message, ...] | None = None,
    ) -> None:
        """A turn that was sampled: `batch` is one sequence, beyond what its branch has recorded of `prompt`."""
        if branch.last is None:
            self._branches.append(branch)
        branch.ids = np.concatenate([prompt, batch.response_ids(0)])
        if record.trained:
            if len(batch.token_ids) != len(branch.ids) - max(branch.recorded - 1, 0):
                raise ValueError(f"{batch.request_ids[0]}: not what is beyond the {branch.recorded} tokens recorded")
            branch.parts.append(batch)
            branch.recorded, branch.reason = len(branch.ids), record.finish_reason
        turn = branch.last = Turn(record, branch, len(branch.ids), closed, messages)
        self.turns.append(turn)
        if messages is not None:
            self._known.setdefault(digests(root, messages)[-1], []).append(turn)

    def samples(self, retries: Mapping[int, int]) -> tuple[tuple[RolloutBatch, ...], tuple[TurnRecord, ...]]:
        """The branches that have something to train on, and all turns in the order in which they were asked for, which
        is not always that in which they ended; `retries` by the turn's number."""
        kept = [branch for branch in self._branches if branch.parts]
        place = {id(branch): number for number, branch in enumerate(kept)}
        names = [f"{self._name}+{number}" if number else self._name for number in range(len(kept))]
        branches = [join_turns(b.parts, request_id=n, finish_reason=b.reason) for b, n in zip(kept, names, strict=True)]
        turns = [
            replace(turn.record, branch=place.get(id(turn.branch), -1), retries=retries.get(turn.record.number, 0))
            for turn in sorted(self.turns, key=lambda turn: turn.record.number)
        ]
        return tuple(branches), tuple(turns)
