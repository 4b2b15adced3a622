"""One packed microbatch: the tensors a rank feeds to its model chunks and, on the last stage, to the objective."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_dppo.batch import AlignedBatch
from megatron_dppo.router_replay.layout import PADDING_ROW, LocalRoutes, local_routes


@dataclass(frozen=True)
class RowTensors:
    """What the objective needs, one entry per row of the pack, `S` rows. Padding rows have `loss_mask` False.

    targets       int64 `[S]`          the token each row predicts
    loss_mask     bool `[S]`
    mu_logp       float32 `[S]`        the engine's log-probability of the target
    sequence      int64 `[S]`          number of the sequence in the source; -1 for padding
    position      int64 `[S]`          row within its sequence
    topk_ids      int64 `[S, K + 1]`   -1 = absent; None unless the preset needs top-K
    topk_member   bool `[S, K + 1]`
    topk_mu_logp  float32 `[S, K + 1]`
    """

    targets: Tensor
    loss_mask: Tensor
    mu_logp: Tensor
    sequence: Tensor
    position: Tensor
    topk_ids: Tensor | None
    topk_member: Tensor | None
    topk_mu_logp: Tensor | None


@dataclass(frozen=True)
class Microbatch:
    """A pack of whole sequences, `S` rows, ending in padding rows that form a sequence of their own."""

    input_ids: Tensor
    """int64 `[1, S]`"""
    position_ids: Tensor
    """int64 `[1, S]`"""
    packed: PackedSeqParams
    rows: RowTensors
    routes: LocalRoutes | None
    """Of this rank's rows and layers; None without replay."""


@dataclass(frozen=True)
class MicrobatchBuilder:
    """Turns aligned sequences into microbatches for one rank."""

    device: torch.device
    sequence_parallel: tuple[int, int]
    """(rank, size); (0, 1) without sequence parallelism. Packs are padded to a multiple of the size."""
    moe_layers: list[int]
    """Indices, among the model's MoE layers, of those on this rank."""
    topk: bool
    """Whether the objective needs the top-K columns."""

    def build(self, batch: AlignedBatch, sequence_numbers: list[int], *, replay: bool) -> Microbatch:
        """`batch` holds exactly the sequences of this pack, in order; `sequence_numbers` are theirs in the source."""
        rank, multiple = self.sequence_parallel
        tokens = len(batch.input_ids)
        padded = max(multiple, -(-tokens // multiple) * multiple)
        padding = padded - tokens
        lengths = np.append(batch.lengths, [padding] if padding else []).astype(np.int64)
        position = np.concatenate([np.arange(n) for n in lengths])
        sequence = np.repeat(np.append(sequence_numbers, [-1] if padding else []).astype(np.int64), lengths)

        def pad(array: np.ndarray, value: float) -> Tensor:
            width = [(0, padding)] + [(0, 0)] * (array.ndim - 1)
            return torch.from_numpy(np.pad(array, width, constant_values=value)).to(self.device)

        offsets = torch.tensor(np.append(0, np.cumsum(lengths)), dtype=torch.int32, device=self.device)
        longest = int(lengths.max())
        routes = None
        if replay:
            if batch.routes is None:
                raise ValueError(
                    "actor.router_replay=r3, but the rollout carries no routes; "
                    "set rollout.router_replay=true or actor.router_replay=none"
                )
            pack_rows = np.append(np.arange(tokens), np.full(padding, PADDING_ROW))
            share = padded // multiple
            routes = local_routes(batch.routes, pack_rows, slice(rank * share, (rank + 1) * share), self.moe_layers)
        return Microbatch(
            input_ids=pad(batch.input_ids, 0).long()[None],
            position_ids=torch.from_numpy(position).to(self.device)[None],
            packed=PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=offsets,
                cu_seqlens_kv=offsets,
                max_seqlen_q=longest,
                max_seqlen_kv=longest,
            ),
            rows=RowTensors(
                targets=pad(batch.target_ids, 0).long(),
                loss_mask=pad(batch.loss_mask, False),
                mu_logp=pad(batch.mu_logp, 0.0),
                sequence=torch.from_numpy(sequence).to(self.device),
                position=torch.from_numpy(position).to(self.device),
                topk_ids=pad(batch.topk_ids, -1).long() if self.topk else None,
                topk_member=pad(batch.topk_member, False) if self.topk else None,
                topk_mu_logp=pad(batch.topk_mu_logp, -np.inf) if self.topk else None,
            ),
            routes=routes,
        )
