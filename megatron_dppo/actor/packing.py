"""Which sequences share a microbatch, on which data-parallel rank. Pure, deterministic, the same on every rank."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

ATTENTION_LENGTH = 8192
"""Length at which attention costs as much as everything linear in the length (of Qwen3-30B-A3B's order)."""


class SequenceTooLongError(ValueError):
    """A sequence alone exceeds the token budget of a microbatch."""


def plan_packs(
    lengths: np.ndarray, *, budget: int, data_parallel: int, microbatch_multiple: int = 1
) -> list[list[list[int]]]:
    """Sequences per data-parallel rank and microbatch: `plan[rank][microbatch]` is a list of sequence numbers.

    lengths               int `[B]`
    budget                most tokens in one microbatch
    data_parallel         ranks to balance over
    microbatch_multiple   the number of microbatches is a multiple of this (interleaved pipelines ask for it)

    Every rank gets the same number of microbatches (expert-parallel ranks must meet in every one of them), so a
    microbatch may be empty. Ranks are balanced by cost, `n (1 + n / ATTENTION_LENGTH)` for `n` tokens; every sequence
    appears exactly once.
    """
    too_long = np.flatnonzero(lengths > budget)
    if len(too_long):
        raise SequenceTooLongError(
            f"sequence {too_long[0]} has {lengths[too_long[0]]} tokens, more than the budget of a microbatch; "
            f"set actor.max_tokens_per_microbatch (now {budget}) to at least {lengths.max()}"
        )
    cost = lengths * (1.0 + lengths / ATTENTION_LENGTH)
    shares = _spread(range(len(lengths)), cost, data_parallel)
    microbatches = max(1, *(-(-int(lengths[share].sum()) // budget) for share in shares))
    while True:
        microbatches = -(-microbatches // microbatch_multiple) * microbatch_multiple
        plan = [_spread(share, lengths, microbatches) for share in shares]
        if all(int(lengths[pack].sum()) <= budget for packs in plan for pack in packs):
            return [[sorted(pack) for pack in packs] for packs in plan]
        microbatches += 1


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
