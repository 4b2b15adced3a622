"""Packing named tensors into byte buckets of bounded size, and reading them back without a copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

_ALIGNMENT = 64


@dataclass(frozen=True)
class TensorSlot:
    """Where one tensor lies in a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * getattr(torch, self.dtype).itemsize


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
        filled = min(filled + -(-data.nbytes // _ALIGNMENT) * _ALIGNMENT, len(payload))
    if slots:
        yield Bucket(tuple(slots), payload[:filled])


def unpack(slots: Iterable[TensorSlot], payload: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Views of `payload` (uint8) by name; they live as long as the payload does."""
    for slot in slots:
        dtype = getattr(torch, slot.dtype)
        raw = payload[slot.offset : slot.offset + slot.nbytes]
        yield slot.name, raw.view(dtype).view(slot.shape) if slot.nbytes else torch.empty(slot.shape, dtype=dtype)
