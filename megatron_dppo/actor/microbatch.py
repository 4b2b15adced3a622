"""One packed microbatch: the tensors a rank feeds to its model chunks and, on the last stage, to the objective."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_dppo.actor.pack_shape import PackShape, Split
from megatron_dppo.batch import AlignedBatch, Columns
from megatron_dppo.batch.context_parallel import zigzag_rows
from megatron_dppo.models.packed_logits import pack_params
from megatron_dppo.router_replay.layout import LocalRoutes, local_routes, sequence_parallel_rows
from megatron_dppo.router_replay.replay import to_device


@dataclass(frozen=True)
class RowTensors:
    """What the objective needs, one entry per row that this context-parallel rank holds, `S` rows. Padding rows have
    `loss_mask` False.
    """

    targets: Tensor
    """int64 `[S]`: the token each row predicts."""
    loss_mask: Tensor
    """bool `[S]`"""
    mu_logp: Tensor
    """float32 `[S]`: the engine's log-probability of the target."""
    sequence: Tensor
    """int64 `[S]`: number of the sequence in the source; -1 for padding."""
    position: Tensor
    """int64 `[S]`: row within its sequence."""
    topk_ids: Tensor | None
    """int64 `[S, K + 1]`: -1 = absent; None unless the preset needs top-K."""
    topk_member: Tensor | None
    """bool `[S, K + 1]`"""
    topk_mu_logp: Tensor | None
    """float32 `[S, K + 1]`"""


@dataclass(frozen=True)
class Microbatch:
    """A context-parallel rank's rows of a pack of whole sequences, `S` rows."""

    input_ids: Tensor
    """int64 `[1, S]`"""
    position_ids: Tensor
    """int64 `[1, S]`"""
    packed: PackedSeqParams
    """Of the whole pack: its lengths include the padding behind each sequence, and padding at the end of the pack is a
    sequence of its own."""
    rows: RowTensors | None
    """On the last pipeline stage only."""
    routes: LocalRoutes | None
    """Of this rank's rows and layers; None without replay."""
    pack_rows: int
    """Rows of the whole pack, on all context-parallel ranks together."""


@dataclass(frozen=True)
class MicrobatchBuilder:
    """Turns aligned sequences into microbatches for one rank."""

    device: torch.device
    split: Split
    context_rank: int
    sequence_rank: int
    """0 without sequence parallelism."""
    moe_layers: tuple[int, ...]
    """Numbers, among the model's MoE layers, of those on this rank, in its order."""
    last_stage: bool
    topk: bool
    """Whether the objective needs the top-K columns."""

    def columns(self, *, routes: bool) -> Columns:
        """What this rank needs of its sequences; `routes` says whether the engine's are replayed."""
        return Columns(
            policy=self.last_stage,
            topk=self.last_stage and self.topk,
            moe_layers=self.moe_layers if routes else (),
        )

    def build(self, batch: AlignedBatch, sequence_numbers: list[int], *, pack_rows: int, replay: bool) -> Microbatch:
        """`batch` holds exactly the sequences of this pack, in order, with `columns(...)`; `sequence_numbers`
        are theirs in the source, `pack_rows` the rows of the pack."""
        shape = PackShape.of(batch.lengths, self.split, rows=pack_rows)
        local = zigzag_rows(shape.lengths, self.context_rank, self.split.context)
        position = self._tensor(shape.position[local])
        return Microbatch(
            input_ids=self._take(batch.input_ids, shape.source[local], 0).long()[None],
            position_ids=position[None],
            packed=pack_params(shape.lengths, self.device),
            rows=self._rows(batch, shape, local, sequence_numbers, position) if self.last_stage else None,
            routes=self._routes(batch, shape, local) if replay else None,
            pack_rows=pack_rows,
        )

    def _rows(
        self, batch: AlignedBatch, shape: PackShape, local: np.ndarray, numbers: list[int], position: Tensor
    ) -> RowTensors:
        policy, topk = batch.policy, batch.topk
        if policy is None or (self.topk and topk is None):
            raise ValueError("the last pipeline stage was given sequences without their policy columns")
        source, own = shape.source[local], shape.sequence[local]
        sequence = np.append(np.asarray(numbers, dtype=np.int64), -1)[own]
        return RowTensors(
            targets=self._take(policy.target_ids, source, 0).long(),
            loss_mask=self._take(policy.loss_mask, source, False),
            mu_logp=self._take(policy.mu_logp, source, 0.0),
            sequence=self._tensor(sequence),
            position=position,
            topk_ids=self._take(topk.ids, source, -1).long() if self.topk and topk else None,
            topk_member=self._take(topk.member, source, False) if self.topk and topk else None,
            topk_mu_logp=self._take(topk.mu_logp, source, -np.inf) if self.topk and topk else None,
        )

    def _routes(self, batch: AlignedBatch, shape: PackShape, local: np.ndarray) -> LocalRoutes | None:
        if not self.moe_layers:
            return None
        if batch.routes is None:
            raise ValueError(
                "actor.router_replay=r3, but the rollout carries no routes; "
                "set rollout.router_replay=true or actor.router_replay=none"
            )
        seen = sequence_parallel_rows(local, self.sequence_rank, self.split.sequence)
        return local_routes(batch.routes, shape.source, seen, list(range(len(self.moe_layers))))

    def _take(self, array: np.ndarray, source: np.ndarray, padding: float) -> Tensor:
        """Rows `source` of `array`; `padding` where that is -1."""
        # Gathered into page-locked memory, which torch keeps and gives out again: no other copy, and no fresh pages.
        kind = torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
        taken = torch.empty((len(source), *array.shape[1:]), dtype=kind, pin_memory=self.device.type == "cuda")
        rows = taken.numpy()
        if len(array):
            np.take(array, source, axis=0, out=rows, mode="clip")
        rows[source < 0] = padding
        return taken.to(self.device, non_blocking=True)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return to_device(array, self.device)


class MicrobatchStream:
    """This rank's microbatches in order. The first is made at once; each of the others when the schedule asks for it,
    on the host, while the device still works on the one before."""

    def __init__(self, make: Callable[[int], Microbatch], pack_rows: Sequence[int]) -> None:
        """
        make       microbatch by its number
        pack_rows  rows of each whole pack
        """
        self.pack_rows = pack_rows
        self._make, self._first = make, make(0)

    def __len__(self) -> int:
        return len(self.pack_rows)

    def iterators(self, chunks: int) -> tuple[Iterator[tuple[int, Microbatch]], ...]:
        """One for each model chunk of this rank; a microbatch is made once and kept until all chunks had it."""
        later = ((number, self._make(number)) for number in range(1, len(self)))
        return itertools.tee(itertools.chain([(0, self._first)], later), chunks)
