"""Packing named tensors into byte buckets of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from megatron_dppo.checkpoint.weight_layout import ALIGNMENT, TensorSlot


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
