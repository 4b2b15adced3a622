"""From routes of whole sequences to the rows one rank replays. Pure functions, no torch.distributed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_dppo.router_replay.routes import Routes

PADDING_ROW = -1
"""Marks a row of a pack that belongs to no sequence."""


@dataclass(frozen=True)
class LocalRoutes:
    """What the routers of one rank see of one microbatch, `S` local rows.

    experts `[S, L, k]` int64, `L` the MoE layers of this rank's model chunks in model order
    forced  bool `[S]`: use `experts`; elsewhere the live router decides (a gap in the record)
    real    bool `[S]`: belongs to a sequence; padding rows are forced, but never counted
    """

    experts: np.ndarray
    forced: np.ndarray
    real: np.ndarray


def sequence_parallel_rows(rows: np.ndarray, rank: int, size: int) -> np.ndarray:
    """The contiguous slice of a pack's rows that sequence-parallel rank `rank` of `size` holds."""
    if len(rows) % size:
        raise ValueError(
            f"a pack of {len(rows)} rows cannot be split over {size} sequence-parallel ranks; pad it first"
        )
    share = len(rows) // size
    return rows[rank * share : (rank + 1) * share]


def local_routes(routes: Routes, pack_rows: np.ndarray, local: np.ndarray | slice, layers: list[int]) -> LocalRoutes:
    """Slice a microbatch's routes for one rank.

    routes     of the source sequences, indexed by the numbers in `pack_rows`
    pack_rows  int `[P]`, row numbers in `routes` of the whole pack, `PADDING_ROW` for padding
    local      which rows of the pack this rank's routers see, in their order: its context-parallel rows, and of them
               its sequence-parallel share
    layers     indices into the routes' MoE layers that this rank holds

    Padding rows cycle through all experts, `topk` at a time, so that no expert-parallel rank gets more of them than
    another (by at most one assignment per pack).
    """
    rows = pack_rows[local]
    real = rows != PADDING_ROW
    source = np.where(real, rows, 0)
    experts = routes.experts[source][:, layers].astype(np.int64) if len(routes) else _no_rows(routes, rows, layers)
    padding_index = np.cumsum(pack_rows == PADDING_ROW)[local] - 1
    spread = (padding_index[:, None] * routes.topk + np.arange(routes.topk)) % routes.num_experts
    experts = np.where(real[:, None, None], experts, spread[:, None, :])
    valid = routes.valid[source] if len(routes) else np.zeros(len(rows), dtype=bool)
    return LocalRoutes(experts=experts, forced=~real | valid, real=real)


def _no_rows(routes: Routes, rows: np.ndarray, layers: list[int]) -> np.ndarray:
    return np.zeros((len(rows), len(layers), routes.topk), dtype=np.int64)
