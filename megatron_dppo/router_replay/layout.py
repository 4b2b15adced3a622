"""From routes of whole sequences to the rows one rank replays. Pure functions, no torch.distributed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_dppo.router_replay.routes import Routes

PADDING_ROW = -1
"""Marks a row of a pack that belongs to no sequence."""


@dataclass(frozen=True)
class LocalRoutes:
    """What the routers of one rank see of one microbatch, `S` local rows."""

    experts: np.ndarray
    """`[S, L, k]` of the routes' narrow type, `L` the MoE layers of this rank's model chunks in model order."""
    forced: np.ndarray
    """bool `[S]`: use `experts`; elsewhere the live router decides (a gap in the record)."""
    real: np.ndarray
    """bool `[S]`: belongs to a sequence; padding rows are forced, but never counted."""
    num_experts: int
    """Experts per layer of the model that recorded them."""


def sequence_parallel_rows(rows: np.ndarray, rank: int, size: int) -> np.ndarray:
    """The contiguous slice of a pack's rows that sequence-parallel rank `rank` of `size` holds."""
    if len(rows) % size:
        raise ValueError(
            f"a pack of {len(rows)} rows cannot be split over {size} sequence-parallel ranks; pad it first"
        )
    share = len(rows) // size
    return rows[rank * share : (rank + 1) * share]


def local_routes(routes: Routes, pack_rows: np.ndarray, local: slice | np.ndarray, layers: list[int]) -> LocalRoutes:
    """Slice a microbatch's routes for one rank.

    routes     of the source sequences, indexed by the numbers in `pack_rows`
    pack_rows  int `[P]`, row numbers in `routes` of the whole pack, `PADDING_ROW` for padding
    local      which rows of the pack this rank's routers see, in their order: a slice, or int `[S]` where they are not
               contiguous (context parallelism, then the sequence-parallel slice of those)
    layers     indices into the routes' MoE layers that this rank holds

    Padding rows cycle through all experts, `topk` at a time, numbered over the whole pack, so that the ranks of a pack
    together give no expert more than one assignment more of them than another.
    """
    rows = pack_rows[local]
    real = rows != PADDING_ROW
    number = np.cumsum(pack_rows == PADDING_ROW)[local] - 1
    spread = (number[~real, None] * routes.topk + np.arange(routes.topk)) % routes.num_experts
    experts = np.empty((len(rows), len(layers), routes.topk), dtype=routes.experts.dtype)
    if real.any():
        every = layers == list(range(routes.experts.shape[1]))
        (routes.experts if every else routes.experts[:, layers]).take(rows, axis=0, mode="clip", out=experts)
    experts[~real] = spread[:, None, :]
    forced = ~real
    forced[real] = routes.valid[rows[real]]
    return LocalRoutes(experts=experts, forced=forced, real=real, num_experts=routes.num_experts)
