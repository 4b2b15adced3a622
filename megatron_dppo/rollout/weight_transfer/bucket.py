"""Packing named tensors into byte buckets of bounded size, and reading them back without a copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from megatron_dppo.checkpoint.weight_layout import ALIGNMENT, TensorSlot, extent


@dataclass(frozen=True)
class Bucket:
    """Tensors laid end to end: `payload` uint8 `[bytes]`, each slot at a multiple of 64."""

    slots: tuple[TensorSlot, ...]
    payload: np.ndarray


def pack(named_tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int) -> Iterator[Bucket]:
    """Fill buckets of at most `bucket_bytes` in the order given; a larger tensor gets a bucket of its own.

    Each tensor is copied before the next is asked for, so a source may reuse its memory. Every bucket has memory of its
    own; besides the tensor at hand one is alive here.
    """
    slots: list[TensorSlot] = []
    payload = np.empty(0, dtype=np.uint8)
    filled = 0
    for name, tensor in named_tensors:
        data = tensor.detach().reshape(-1).contiguous()
        if filled + data.nbytes > len(payload):
            if slots:
                yield Bucket(tuple(slots), payload[:filled])
            slots, filled = [], 0
            payload = np.empty(max(bucket_bytes, data.nbytes), dtype=np.uint8)
        torch.from_numpy(payload[filled : filled + data.nbytes]).copy_(data.view(torch.uint8))
        slots.append(TensorSlot(name, str(data.dtype).removeprefix("torch."), tuple(tensor.shape), filled))
        filled = min(filled + -(-data.nbytes // ALIGNMENT) * ALIGNMENT, len(payload))
    if slots:
        yield Bucket(tuple(slots), payload[:filled])


def unpack(slots: Iterable[TensorSlot], payload: torch.Tensor) -> Iterator[tuple[TensorSlot, torch.Tensor]]:
    """The tensor of each slot; of several experts `[experts, *shape]`. Views of `payload` (uint8) that live as long as
    it does, but for tensors that lie there in blocks: those are put together in memory of their own."""
    for slot in slots:
        dtype = getattr(torch, slot.dtype)
        if not slot.nbytes:
            yield slot, torch.empty(slot.shape, dtype=dtype, device=payload.device)
            continue
        raw = payload[slot.offset : slot.offset + slot.nbytes].view(dtype)
        if slot.experts is not None:
            yield slot, raw.view(slot.count, *slot.shape)
        elif slot.blocks:
            yield slot, _assembled(slot, raw)
        else:
            yield slot, raw.view(slot.shape)


def _assembled(slot: TensorSlot, raw: torch.Tensor) -> torch.Tensor:
    whole = torch.empty(slot.shape, dtype=raw.dtype, device=raw.device)
    start = 0
    for block in slot.blocks:
        stop = start + prod(extent(block))
        whole[tuple(slice(*span) for span in block)] = raw[start:stop].view(extent(block))
        start = stop
    return whole
