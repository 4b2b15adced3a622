"""What a fleet is asked for: groups of requests, and who waits for them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import numpy as np

from megatron_dppo.rollout.engine import GenerationRequest, SamplingConfig
from megatron_dppo.rollout.stored import LayerGroups

_END = object()


@dataclass(eq=False)
class Work:
    """Requests that go to one engine in one call: whole groups, so that samples of a prompt share its keys and
    values."""

    requests: list[GenerationRequest]
    ticket: Ticket = field(repr=False)
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Of the call, and of the object that holds its result."""
    timeouts: int = 0
    """How often a request of it took too long."""

    @property
    def affinity(self) -> str:
        """See `GenerationRequest`; empty for requests that have none in common."""
        first = self.requests[0].affinity
        return first if all(request.affinity == first for request in self.requests) else ""

    @property
    def tokens(self) -> int:
        """Most tokens that it can come to: what it counts against an engine's budget."""
        return sum(len(r.prompt_ids) for r in self.requests) + len(self.requests) * self.ticket.sampling.max_tokens

    def again(self) -> None:
        """It is to be sampled anew. Seeds are the requests' own, so the answers are those that were lost."""
        self.key = uuid.uuid4().hex


class Ticket:
    """One call of the fleet: its work, and the results as they come. Written by the dispatcher, read by whoever
    waits."""

    def __init__(
        self,
        groups: Sequence[Sequence[GenerationRequest]],
        sampling: SamplingConfig,
        *,
        training: bool,
        stored: bool = False,
        layer_groups: LayerGroups | None = None,
        enough: int | None = None,
    ) -> None:
        """
        groups  requests of each piece of work
        stored  whether results stay in the object store, rather than come here
        enough  pieces of work after which the others are dropped; None drops nothing
        """
        self.sampling, self.training, self.stored, self.layer_groups = sampling, training, stored, layer_groups
        self.work = [Work(list(group), self) for group in groups]
        self._enough = len(self.work) if enough is None else enough
        self._results: dict[Work, Any] = {}
        self._error: BaseException | None = None
        self.closed = False
        """Whether nothing more is wanted: enough came, or it failed."""
        self._came: SimpleQueue[Any] = SimpleQueue()
        """Results that nobody has taken yet, and `_END` behind the last."""

    @property
    def asked(self) -> int:
        """Sequences that whoever waits is to get."""
        return sum(len(work.requests) for work in self.work[: self._enough])

    @property
    def answered(self) -> int:
        """Sequences that have come."""
        return sum(len(work.requests) for work in self._results)

    def deliver(self, work: Work, result: Any) -> None:
        """Take the result of a piece of work. Raises RuntimeError for one that came before."""
        if work in self._results:
            raise RuntimeError(f"the result of {work.requests[0].request_id} and its group came twice")
        self._results[work] = result
        self._came.put(result)
        if len(self._results) == self._enough:
            self._close()

    def fail(self, error: BaseException) -> None:
        """Nothing more will come."""
        if not self.closed:
            self._error = error
            self._close()

    def _close(self) -> None:
        self.closed = True
        self._came.put(_END)

    def wait(self, arrived: Callable[[Any], None] = lambda result: None) -> list[Any]:
        """The results in the order of the work that they belong to; raises what the work failed with. `arrived` is
        called here with each as it comes."""
        while (result := self._came.get()) is not _END:
            arrived(result)
        if self._error is not None:
            raise self._error
        return [self._results[work] for work in self.work if work in self._results]


def in_pieces(
    requests: Sequence[GenerationRequest], most: int, *, samples: int | None = None
) -> list[list[GenerationRequest]]:
    """Consecutive requests in pieces of at most `most`; a group (neighbours with one prompt, at most `samples` of them
    where that is given) is never cut, however large."""
    groups: list[list[GenerationRequest]] = []
    for request in requests:
        same = bool(groups) and np.array_equal(groups[-1][0].prompt_ids, request.prompt_ids)
        if same and len(groups[-1]) != samples:
            groups[-1].append(request)
        else:
            groups.append([request])
    pieces: list[list[GenerationRequest]] = []
    for group in groups:
        if pieces and len(pieces[-1]) + len(group) <= most:
            pieces[-1] += group
        else:
            pieces.append(list(group))
    return pieces
