"""Which sequences share a microbatch, on which data-parallel rank. Pure, deterministic, the same on every rank."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from megatron_dppo.actor.pack_shape import Split

ATTENTION_LENGTH = 8192
"""Length at which attention costs as much as everything linear in the length (of Qwen3-30B-A3B's order)."""

LongSequences = Literal["refuse", "alone"]


class SequenceTooLongError(ValueError):
    """A sequence alone exceeds the token budget of a microbatch."""


@dataclass(frozen=True)
class PackPlan:
    """The microbatches of every data-parallel rank.

    packs[rank][microbatch]  sequence numbers; every rank has equally many microbatches, and some may be empty
    rows[rank][microbatch]   rows of the pack, padding included
    """

    packs: list[list[list[int]]]
    rows: list[list[int]]
    real_rows: int
    """Rows of all sequences together."""
    imbalance: float
    """Cost of the busiest rank over the mean cost (1 = even)."""

    def of(self, sequences: np.ndarray) -> PackPlan:
        """The same plan for the named sequences of a larger set, whose lengths were given in this order."""
        packs = [[[int(sequences[i]) for i in pack] for pack in of_rank] for of_rank in self.packs]
        return replace(self, packs=packs)

    @property
    def padded_rows(self) -> int:
        """Rows of all packs, padding included."""
        return sum(map(sum, self.rows))


def plan_packs(
    lengths: np.ndarray,
    *,
    budget: int,
    data_parallel: int,
    split: Split | None = None,
    microbatch_multiple: int = 1,
    long_sequences: LongSequences = "refuse",
    equal_rows: bool = False,
) -> PackPlan:
    """Balance sequences of `lengths` rows over ranks and microbatches.

    budget                most rows in one pack, the padding of its sequences included
    data_parallel         ranks to balance over; context-parallel ranks share one rank's packs
    split                 how a pack is spread over ranks, which decides its padding
    microbatch_multiple   the number of microbatches is a multiple of this (interleaved pipelines ask for it)
    long_sequences        what to do with a sequence over the budget: refuse it, or give it a microbatch of its own
    equal_rows            pad all packs to the longest (dispatchers that gather tokens ask for it)

    Ranks are balanced by cost, `n (1 + n / ATTENTION_LENGTH)` for `n` rows; every sequence appears exactly once. Every
    rank gets the same number of microbatches (expert-parallel ranks must meet in every one of them).
    """
    split = split or Split()
    padded = split.padded(lengths)
    too_long = np.flatnonzero(padded > budget)
    if len(too_long) and long_sequences == "refuse":
        raise SequenceTooLongError(
            f"sequence {too_long[0]} has {lengths[too_long[0]]} tokens, more than the budget of a microbatch; "
            f"set actor.max_tokens_per_microbatch (now {budget}) to at least {padded.max()}, or "
            "actor.long_sequences=alone to give such sequences a microbatch of their own"
        )
    cost = padded * (1.0 + padded / ATTENTION_LENGTH)
    shares = _spread(range(len(padded)), cost, data_parallel)
    microbatches = max(1, *(-(-int(np.minimum(padded[share], budget).sum()) // budget) for share in shares))
    while True:
        microbatches = -(-microbatches // microbatch_multiple) * microbatch_multiple
        plan = [_spread(share, padded, microbatches) for share in shares]
        if all(len(pack) <= 1 or int(padded[pack].sum()) <= budget for packs in plan for pack in packs):
            break
        microbatches += 1
    packs = [[sorted(pack) for pack in packs] for packs in plan]
    rows = [[split.pack_rows(lengths[pack]) for pack in of_rank] for of_rank in packs]
    if equal_rows:
        longest = max(map(max, rows))
        rows = [[longest] * microbatches for _ in rows]
    loads = [float(cost[share].sum()) for share in shares]
    mean = sum(loads) / len(loads)
    return PackPlan(packs, rows, int(lengths.sum()), max(loads) / mean if mean else 1.0)


def _spread(items: Sequence[int], weight: np.ndarray, bins: int) -> list[list[int]]:
    """Longest processing time first: heaviest item to the lightest bin; ties by number, so the result is unique."""
    loads = [(0.0, index) for index in range(bins)]
    heapq.heapify(loads)
    chosen: list[list[int]] = [[] for _ in range(bins)]
    for item in sorted(items, key=lambda i: (-weight[i], i)):
        load, index = heapq.heappop(loads)
        chosen[index].append(item)
        heapq.heappush(loads, (load + float(weight[item]), index))
    return chosen
