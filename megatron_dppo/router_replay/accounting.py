"""Accounting of router replay: each recorded route is replayed exactly once in every MoE layer, or the step fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
import torch.distributed as dist


class RoutesLost(RuntimeError):
    """Routes that the engine recorded were not replayed, or others were. The step's gradients are not to be used."""


@dataclass(frozen=True)
class ReplayCounts:
    """What one rank's routers did, in rows, int64 `[M, L]` over its microbatches and MoE layers. Padding rows are never
    counted."""

    sent: np.ndarray
    """Rows with a record that the microbatch brought."""
    replayed: np.ndarray
    """Rows whose recorded experts a forward used (or, when only observing, compared)."""
    kept: np.ndarray
    """Rows, gaps included, whose experts a forward kept for activation recomputation."""
    recomputed: np.ndarray
    """Rows, gaps included, that a recomputation then used."""
    gaps: np.ndarray
    """Rows without a record, routed live."""
    differing: np.ndarray
    """Replayed rows whose live top-k set is another."""
    differing_tokens: np.ndarray
    """int64 `[M]`: rows that differ in any of this rank's layers."""


_MATRICES = ("sent", "replayed", "kept", "recomputed", "gaps", "differing")


@dataclass(frozen=True)
class ReplayAccount:
    """Totals over the job and over microbatches, in rows: int64 `[L]` over all MoE layers of the model.

    The other fields are those of `ReplayCounts`.
    """

    recorded: np.ndarray
    """Rows with a route, as the engine stated them when it handed the rollout over."""
    sent: np.ndarray
    replayed: np.ndarray
    kept: np.ndarray
    recomputed: np.ndarray
    gaps: np.ndarray
    differing: np.ndarray
    differing_tokens: int
    """Rows that differ in any layer; a row that differs on several pipeline stages counts for each."""

    def __add__(self, other: ReplayAccount) -> ReplayAccount:
        return ReplayAccount(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def metrics(self) -> dict[str, float]:
        """Totals over layers under `r3/`, and the differing fraction of each layer under `r3_layer/`."""
        totals = {f"r3/{name}_routings": float(getattr(self, name).sum()) for name in ("recorded", *_MATRICES)}
        del totals["r3/differing_routings"]
        fraction = self.differing / np.maximum(self.replayed, 1)
        return (
            totals
            | {
                "r3/gap_routings": totals.pop("r3/gaps_routings"),
                "r3/differing_fraction": float(self.differing.sum() / max(self.replayed.sum(), 1)),
                "r3/differing_tokens": float(self.differing_tokens),
            }
            | {f"r3_layer/differing_fraction_{layer:02d}": float(value) for layer, value in enumerate(fraction)}
        )


def settle(
    counts: ReplayCounts,
    *,
    layers: Sequence[int],
    moe_layers: int,
    recorded: np.ndarray,
    rows: np.ndarray,
    data_rank: int,
    device: torch.device,
) -> ReplayAccount:
    """Add up what all ranks did and compare it with what the rollout recorded.

    counts      of this rank
    layers      numbers, among the model's `moe_layers`, of the columns of `counts`
    recorded    int `[D, M]`, rows with a route in microbatch m of data-parallel rank d, as the engine stated them
    rows        int `[D, M]`, rows of that microbatch without padding
    data_rank   d of this rank
    device      of the job's collectives

    One SUM over the whole job; tensor-, context- and pipeline-parallel ranks hold disjoint (row, layer) pairs, so each
    is counted once. Every rank returns or raises the same. Raises `RoutesLost` naming the first layer, microbatch and
    data-parallel rank at fault.
    """
    replicas, microbatches = recorded.shape
    if counts.replayed.shape != (microbatches, len(layers)):
        raise ValueError(
            f"counts of {counts.replayed.shape} (microbatch, layer) pairs, not {microbatches, len(layers)}"
        )
    table = np.zeros((len(_MATRICES), replicas, microbatches, moe_layers), dtype=np.int64)
    for index, name in enumerate(_MATRICES):
        table[index, data_rank][:, list(layers)] = getattr(counts, name)
    total = torch.from_numpy(np.append(table.ravel(), counts.differing_tokens.sum())).to(device)
    dist.all_reduce(total)
    summed = total.cpu().numpy()
    by_name = dict(zip(_MATRICES, summed[:-1].reshape(table.shape), strict=True))
    _check(by_name, recorded, rows)
    of_layer = {name: matrix.sum(axis=(0, 1)) for name, matrix in by_name.items()}
    stated = np.full(moe_layers, recorded.sum(), dtype=np.int64)
    return ReplayAccount(recorded=stated, differing_tokens=int(summed[-1]), **of_layer)


def _check(table: dict[str, np.ndarray], recorded: np.ndarray, rows: np.ndarray) -> None:
    recorded, rows = recorded[:, :, None], rows[:, :, None]
    equalities = (
        ("sent", recorded, "rows with a route reached the trainer's ranks, the engine recorded"),
        ("replayed", recorded, "recorded routes were replayed in the forward pass of the"),
        ("gaps", rows - recorded, "rows went to the live router for want of a record, expected were"),
        ("recomputed", table["kept"], "routings were used by activation recomputation, the forward pass kept"),
    )
    for name, expected, sentence in equalities:
        wrong = table[name] != expected
        if wrong.any():
            replica, microbatch, layer = (int(i) for i in np.argwhere(wrong)[0])
            want = int(np.broadcast_to(expected, wrong.shape)[replica, microbatch, layer])
            raise RoutesLost(
                f"router replay: MoE layer {layer}, microbatch {microbatch} of data-parallel rank {replica}: "
                f"{int(table[name][replica, microbatch, layer])} {sentence} {want} "
                f"({int(wrong.sum())} of {wrong.size} (microbatch, layer) pairs are wrong)"
            )
