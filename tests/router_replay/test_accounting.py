"""Accounting: sums over ranks, and one wrong cell is found by name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.distributed import run_ranks

# Two data-parallel ranks of two pipeline stages each; 3 MoE layers (0 on the first stage, 1 and 2 on the second).
LAYERS = {0: [0], 1: [1, 2]}
RECORDED = np.array([[5, 0, 7], [4, 4, 0]])
ROWS = np.array([[6, 2, 7], [4, 5, 0]])


def true_counts(data: int, layers: list[int]):
    from megatron_dppo.router_replay.accounting import ReplayCounts

    def each(per_microbatch: np.ndarray) -> np.ndarray:
        return np.repeat(per_microbatch[:, None], len(layers), axis=1).astype(np.int64)

    return ReplayCounts(
        sent=each(RECORDED[data]),
        replayed=each(RECORDED[data]),
        kept=each(ROWS[data]),
        recomputed=each(ROWS[data]),
        gaps=each(ROWS[data] - RECORDED[data]),
        differing=each(RECORDED[data] // 2),
        differing_tokens=RECORDED[data] // 2,
    )


def settle_on_rank(rank: int, faults: list) -> list:
    """Per fault (rank, field, (microbatch, column), change): the message that this rank sees, or the account."""
    import torch

    from megatron_dppo.router_replay.accounting import RoutesLost, settle

    data, stage = divmod(rank, 2)
    seen = []
    for fault in faults:
        counts = true_counts(data, LAYERS[stage])
        if fault is not None and fault[0] == rank:
            _, field, cell, change = fault
            matrix = getattr(counts, field).copy()
            matrix[cell] += change
            counts = replace(counts, **{field: matrix})
        try:
            account = settle(
                counts,
                layers=LAYERS[stage],
                moe_layers=3,
                recorded=RECORDED,
                rows=ROWS,
                data_rank=data,
                device=torch.device("cpu"),
            )
            seen.append(account.metrics())
        except RoutesLost as error:
            seen.append(str(error))
    return seen


FAULTS = [
    None,
    (0, "sent", (2, 0), -1),
    (3, "replayed", (1, 1), -4),
    (2, "gaps", (0, 0), 2),
    (1, "recomputed", (0, 0), -6),
    (1, "differing", (0, 0), 1),
]
MESSAGES = [
    "MoE layer 0, microbatch 2 of data-parallel rank 0: 6 rows with a route reached the trainer's ranks, the engine "
    "recorded 7 (1 of 18",
    "MoE layer 2, microbatch 1 of data-parallel rank 1: 0 recorded routes were replayed in the forward pass of the 4",
    "MoE layer 0, microbatch 0 of data-parallel rank 1: 2 rows went to the live router for want of a record, expected "
    "were 0",
    "MoE layer 1, microbatch 0 of data-parallel rank 0: 0 routings were used by activation recomputation, the forward "
    "pass kept 6",
]


def test_every_rank_sees_the_same_books_and_the_same_fault():
    results = run_ranks(settle_on_rank, 4, FAULTS)
    assert all(other == results[0] for other in results[1:])
    honest, *faulty, other_choice = results[0]
    assert honest["r3/recorded_routings"] == honest["r3/replayed_routings"] == honest["r3/sent_routings"] == 3 * 20
    assert honest["r3/gap_routings"] == 3 * 4
    assert honest["r3/recomputed_routings"] == honest["r3/kept_routings"] == 3 * 24
    assert honest["r3/differing_fraction"] == pytest.approx(9 / 20)
    assert honest["r3/differing_tokens"] == 2 * 9  # counted once per pipeline stage
    assert honest["r3_layer/differing_fraction_02"] == pytest.approx(9 / 20)
    for message, expected in zip(faulty, MESSAGES, strict=True):
        assert expected in message
    assert other_choice["r3_layer/differing_fraction_01"] == pytest.approx(10 / 20), "a choice is no fault"
