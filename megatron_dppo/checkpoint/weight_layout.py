"""How the weights of a model lie in buckets on their way to an engine: plain data, the same on every rank; and buckets
of bounded size that are packed in one process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from megatron_dppo.models.names import Block

ALIGNMENT = 64
"""Each slot begins at a multiple of this many bytes."""

EXPERT = "{expert}"
"""Stands for the expert's number in the name of a slot that holds several."""


@dataclass(frozen=True)
class TensorSlot:
    """Where one tensor, or the same tensor of consecutive experts, lies in a bucket."""

    name: str
    """Hugging Face name; with `{expert}` in it where `experts` is given."""
    dtype: str
    """As torch names it."""
    shape: tuple[int, ...]
    """Of one tensor."""
    offset: int
    """Bytes from the bucket's beginning."""
    blocks: tuple[Block, ...] = ()
    """() where the tensor lies whole; else its blocks, which lie one after another, each contiguous: all of them, or
    those that the worker of the bucket's share needs."""
    experts: tuple[int, int] | None = None
    """(first, last + 1): that many tensors lie one after another, whole, or of each the one block."""

    @property
    def count(self) -> int:
        """Tensors in this slot."""
        return 1 if self.experts is None else self.experts[1] - self.experts[0]

    @property
    def nbytes(self) -> int:
        numbers = sum(prod(extent(block)) for block in self.blocks) if self.blocks else prod(self.shape)
        return self.count * numbers * int(getattr(torch, self.dtype).itemsize)

    def names(self) -> Iterator[str]:
        """Hugging Face names of the tensors in this slot."""
        if self.experts is None:
            yield self.name
        else:
            yield from (self.name.replace(EXPERT, str(number)) for number in range(*self.experts))


@dataclass(frozen=True)
class Segment:
    """Bytes of a bucket that come from one rank."""

    source: int
    start: int
    stop: int


@dataclass(frozen=True)
class BucketLayout:
    """One bucket: `size` bytes, cut into slots for who loads it and into segments for who sends it."""

    slots: tuple[TensorSlot, ...]
    segments: tuple[Segment, ...]
    size: int
    share: int | None = None
    """Number in its engine of the only worker that needs it, of those that divide the experts or each of them; None:
    all do."""

    def goes_to(self, worker: int) -> bool:
        """Whether the worker of this number in its engine needs it."""
        return self.share in (None, worker)


def share_of(experts: int, share: int, shares: int) -> tuple[int, int]:
    """(first, last + 1) of a layer's experts that worker `share` of `shares` has, as vLLM divides them: in order, the
    first workers one more where it does not come out even."""
    each, left = divmod(experts, shares)
    first = share * each + min(share, left)
    return first, first + each + (share < left)


def aligned(offset: int) -> int:
    """The next place where a slot may begin."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def extent(block: Block) -> tuple[int, ...]:
    """Shape of a block."""
    return tuple(len(range(*span)) for span in block)


def lies_whole(shape: tuple[int, ...], blocks: list[Block]) -> bool:
    """Whether blocks that tile a tensor of `shape` make it up when they are laid end to end: each takes all of every
    dimension but the first, and they come in order."""
    return all(span == (0, size) for block in blocks for span, size in zip(block[1:], shape[1:], strict=True)) and (
        blocks == sorted(blocks)
    )


def unpack(slots: Iterable[TensorSlot], payload: torch.Tensor) -> Iterator[tuple[TensorSlot, torch.Tensor]]:
    """The tensor of each slot; of several experts `[experts, *shape]`. Views of `payload` (uint8) that live as long as
    it does, but for tensors that lie there in blocks: those are put together in memory of their own, and what of them
    this worker does not need is any number."""
    for slot in slots:
        dtype = getattr(torch, slot.dtype)
        if not slot.nbytes:
            yield slot, torch.empty(slot.shape, dtype=dtype, device=payload.device)
            continue
        raw = payload[slot.offset : slot.offset + slot.nbytes].view(dtype)
        if slot.experts is not None:
            yield slot, _filled(slot, raw) if slot.blocks else raw.view(slot.count, *slot.shape)
        elif slot.blocks:
            yield slot, _assembled(slot, raw)
        else:
            yield slot, raw.view(slot.shape)


def _filled(slot: TensorSlot, raw: torch.Tensor) -> torch.Tensor:
    (block,) = slot.blocks
    whole = torch.empty((slot.count, *slot.shape), dtype=raw.dtype, device=raw.device)
    whole[(slice(None), *(slice(*span) for span in block))] = raw.view(slot.count, *extent(block))
    return whole


def _assembled(slot: TensorSlot, raw: torch.Tensor) -> torch.Tensor:
    whole = torch.empty(slot.shape, dtype=raw.dtype, device=raw.device)
    start = 0
    for block in slot.blocks:
        stop = start + prod(extent(block))
        whole[tuple(slice(*span) for span in block)] = raw[start:stop].view(extent(block))
        start = stop
    return whole


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
