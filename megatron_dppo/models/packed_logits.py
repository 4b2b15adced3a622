"""Packed sequences as Megatron-Core is told of them, and their logits from a model under any layout (verification and
tests; training never makes these)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_dppo.router_replay.replay import to_device

Pack = tuple[torch.Tensor, list[int]]
"""Token ids `[T]` of sequences one after another, and their lengths, which sum to `T`."""


def pack_params(lengths: Sequence[int] | np.ndarray, device: torch.device) -> PackedSeqParams:
    """Causal attention within each of the sequences."""
    offsets = to_device(np.append(0, np.cumsum(lengths)).astype(np.int32), device)
    longest = int(np.max(lengths))
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


@torch.no_grad()
def packed_logits(models: Sequence[GPTModel], packs: Sequence[Pack]) -> list[torch.Tensor]:
    """This rank's vocabulary shard `[T, V / TP]` of every pack's logits, in the model's dtype.

    Each pack is a microbatch of Megatron-Core's pipeline schedule (interleaved pipelines want a multiple of their
    stages). Only the last stage has logits; elsewhere the list is empty. Columns past the true vocabulary mean nothing.
    Without context parallelism; under sequence parallelism `T` is a multiple of the tensor-parallel size.
    """
    device = next(models[0].parameters()).device

    def step(data: Iterator[Pack], gpt: GPTModel) -> tuple[torch.Tensor, Any]:
        ids, lengths = next(data)
        positions = torch.arange(len(ids), device=device)[None]
        out = gpt(ids.to(device)[None], positions, None, packed_seq_params=pack_params(lengths, device))
        return out, lambda output, non_loss_data: output

    results = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(packs) for _ in models],
        model=list(models),
        num_microbatches=len(packs),
        seq_length=max(len(ids) for ids, _ in packs),
        micro_batch_size=1,
        forward_only=True,
        collect_non_loss_data=True,
    )
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return []
    return [logits[0] for logits in results if torch.is_tensor(logits)]
