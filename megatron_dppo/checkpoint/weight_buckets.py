"""The weights of a sharded model as byte buckets: every rank writes what it owns to where it belongs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod

import torch
import torch.distributed as dist

from megatron_dppo.checkpoint.weight_layout import (
    EXPERT,
    BucketLayout,
    Segment,
    TensorSlot,
    aligned,
    extent,
    lies_whole,
    share_of,
)
from megatron_dppo.models.names import Block

_EXPERT_TENSOR = re.compile(r"(.+\.experts\.)(\d+)(\..+)")
_STACKED = re.compile(r".+\.experts\.\w+")
"""A layer's experts as one tensor, as some families write them."""
_CUT = {"gate_proj": 0, "up_proj": 0, "w1": 0, "w3": 0, "down_proj": 1, "w2": 1}
"""The dimension in which tensor parallelism divides a matrix of an expert. Others go to all workers whole."""


@dataclass(frozen=True)
class Source:
    """One block of a Hugging Face tensor and the rank that sends it."""

    rank: int
    block: Block


@dataclass(frozen=True)
class _Item:
    """A slot that has no place yet, and where each of its tensors comes from."""

    slot: TensorSlot
    sources: tuple[tuple[str, Source], ...]
    """(name, source) in the order in which the bytes lie."""
    share: int | None = None
    """See `BucketLayout.share`."""
    part: Block | None = None
    """What of each source lies here, where that is not all."""

    def take(self, count: int) -> tuple[_Item, _Item | None]:
        """The first `count` experts of a stack, and the rest."""
        if count >= self.slot.count:
            return self, None
        assert self.slot.experts is not None
        first, stop = self.slot.experts
        head = replace(self.slot, experts=(first, first + count))
        tail = replace(self.slot, experts=(first + count, stop))
        return replace(self, slot=head, sources=self.sources[:count]), replace(
            self, slot=tail, sources=self.sources[count:]
        )

    def divided(self, shares: int, *, sliced: bool) -> Iterator[_Item]:
        """The parts of this item that go to one worker each (`share` set), where it holds experts; otherwise itself.

        shares  workers of an engine, see `RolloutConfig.weight_shares`; 1 divides nothing
        sliced  whether a worker's part is a slice of every expert, rather than whole experts
        """
        if shares > 1 and sliced and self.slot.experts is not None:
            yield from self._sliced(shares)
            return
        if shares > 1 and not sliced and self.slot.experts is None and _STACKED.fullmatch(self.slot.name):
            yield from self._by_block(shares)
            return
        if shares == 1 or sliced or self.slot.experts is None:
            yield self
            return
        rest: _Item | None = self
        for share in range(shares):
            first, stop = share_of(self.slot.experts[1], share, shares)
            if rest is not None and stop > first:
                own, rest = rest.take(stop - first)
                yield replace(own, share=share)

    def _sliced(self, shares: int) -> Iterator[_Item]:
        """Rows, or columns, of every matrix for each worker, as vLLM cuts them."""
        dim = _CUT.get(self.slot.name.partition(f".{EXPERT}.")[2].removesuffix(".weight"))
        if dim is None or self.slot.shape[dim] % shares:
            yield self
            return
        spans, each = tuple((0, size) for size in self.slot.shape), self.slot.shape[dim] // shares
        for share in range(shares):
            part = (*spans[:dim], (share * each, (share + 1) * each), *spans[dim + 1 :])
            yield replace(self, slot=replace(self.slot, blocks=(part,)), share=share, part=part)

    def _by_block(self, shares: int) -> Iterator[_Item]:
        """Of a layer's experts in one tensor those of each worker."""
        experts = self.slot.shape[0]
        if experts % shares or any(
            source.block[0][0] * shares // experts != (source.block[0][1] - 1) * shares // experts
            for _, source in self.sources
        ):
            yield self
            return
        for share in range(shares):
            own = tuple(one for one in self.sources if one[1].block[0][0] * shares // experts == share)
            blocks = tuple(source.block for _, source in own)
            yield replace(self, slot=replace(self.slot, blocks=blocks), sources=own, share=share)


@dataclass(frozen=True)
class _Own:
    """Consecutive bytes of a bucket that this rank writes: blocks of its parameters, end to end."""

    start: int
    stop: int
    dtype: torch.dtype
    blocks: list[Callable[[], torch.Tensor]]
    columns: int = 0
    """Of blocks that are matrices, each a part of the columns of a larger one: how many; 0 where they are rows of
    numbers."""


class WeightBuckets:
    """Buckets of a model, planned once: the same on every rank, each with what this rank writes.

    Within a layer the experts' tensors are stacked by matrix (all gate projections, all up projections, ...), so that a
    rank writes its experts with one concatenation and a receiver loads them with one call, not with one per tensor.
    Where the workers of an engine divide the experts, or each of them, what each worker needs has buckets of its own.
    """

    def __init__(
        self,
        tensors: Sequence[tuple[str, tuple[int, ...], torch.dtype]],
        sources: Mapping[str, Sequence[Source]],
        local: Mapping[tuple[str, Block], Callable[[], torch.Tensor]],
        *,
        rank: int,
        bucket_bytes: int,
        shares: int = 1,
        sliced: bool = False,
    ) -> None:
        """
        tensors       (Hugging Face name, shape, dtype) of the whole model, in the order of `by_matrix`
        sources       of each tensor; blocks tile it
        local         blocks that this rank sends: how to get one, asked anew for each sync (Megatron-Core's buffers,
                      and offloading, put other memory behind a parameter)
        bucket_bytes  of a bucket; a dense tensor that is larger gets a bucket of its own
        shares        workers of an engine that divide the experts among them
        sliced        whether each of them has a slice of every expert (tensor parallelism), in place of whole ones
        """
        self._local, self._rank = local, rank
        self._own: list[list[_Own]] = []
        self.layouts: list[BucketLayout] = []
        open_buckets: dict[int | None, list[_Item]] = {}
        for whole in _items(tensors, sources):
            for part in whole.divided(shares, sliced=sliced):
                filled = open_buckets.setdefault(part.share, [])
                item: _Item | None = part
                while item is not None:
                    start = aligned(_end(filled))
                    room = (bucket_bytes - start) // (item.slot.nbytes // item.slot.count)
                    if room < 1 and filled:
                        self._close(filled)
                        filled.clear()
                        continue
                    taken, item = item.take(max(room, 1) if item.slot.experts else 1)
                    filled.append(replace(taken, slot=replace(taken.slot, offset=start)))
        for filled in open_buckets.values():
            if filled:
                self._close(filled)
        self.shares = sorted({layout.share for layout in self.layouts if layout.share is not None})
        """Workers of an engine that have buckets of their own."""

    @property
    def owners(self) -> list[int]:
        """Ranks that send anything, in order."""
        return self.senders(self.layouts)

    def owners_of(self, share: int) -> list[int]:
        """Ranks that send anything of what one worker of an engine alone needs, in order."""
        return self.senders(layout for layout in self.layouts if layout.share == share)

    @staticmethod
    def senders(layouts: Iterable[BucketLayout]) -> list[int]:
        """Ranks that send anything of these, in order."""
        return sorted({segment.source for layout in layouts for segment in layout.segments})

    @property
    def worker_nbytes(self) -> int:
        """Most that a worker of an engine takes."""
        return max(
            sum(layout.size for layout in self.layouts if layout.goes_to(worker)) for worker in self.shares or [0]
        )

    @property
    def nbytes(self) -> int:
        """Of all buckets."""
        return sum(layout.size for layout in self.layouts)

    @property
    def largest(self) -> int:
        """Bytes of the largest bucket."""
        return max(layout.size for layout in self.layouts)

    @torch.no_grad()
    def write(self, index: int, payload: torch.Tensor) -> None:
        """Write this rank's segments of bucket `index` into `payload` (uint8 on the parameters' device, at least as
        large as the bucket). Asynchronous on a GPU; no collectives."""
        for own in self._own[index]:
            target = payload[own.start : own.stop].view(own.dtype)
            if own.columns:
                torch.cat([local() for local in own.blocks], out=target.view(-1, own.columns))
                continue
            parts = [part if part.ndim == 1 else part.reshape(-1) for part in (local() for local in own.blocks)]
            if len(parts) == 1:
                target.copy_(parts[0])
            else:
                torch.cat(parts, out=target)

    def gather(self, index: int, payload: torch.Tensor) -> None:
        """`write`, and the whole bucket on rank 0. Collective over the world, point to point."""
        self.write(index, payload)
        under_way = []
        for segment in self.layouts[index].segments:
            if segment.source == 0:
                continue
            part = payload[segment.start : segment.stop]
            if self._rank == 0:
                under_way.append(dist.P2POp(dist.irecv, part, segment.source))
            elif self._rank == segment.source:
                under_way.append(dist.P2POp(dist.isend, part, 0))
        # As a batch they go over the job's communicator: one by one NCCL would make one for every sender, and rank 0
        # would keep them all.
        for request in dist.batch_isend_irecv(under_way) if under_way else ():
            request.wait()

    def spread(self, index: int, payload: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
        """`write`, and the whole bucket on every rank of `group` (None: of the world). Collective over it: a broadcast
        per segment."""
        self.write(index, payload)
        for segment in self.layouts[index].segments if dist.get_world_size(group) > 1 else ():
            dist.broadcast(payload[segment.start : segment.stop], src=segment.source, group=group)

    def _close(self, items: Sequence[_Item]) -> None:
        """Make a bucket of what was collected."""
        segments: list[Segment] = []
        own: list[_Own] = []
        for item in items:
            dtype = getattr(torch, item.slot.dtype)
            place = item.slot.offset
            for name, source in item.sources:
                stop = place + prod(extent(item.part or source.block)) * dtype.itemsize
                last = segments[-1] if segments else None
                if last is not None and last.source == source.rank and aligned(last.stop) >= place:
                    segments[-1] = replace(last, stop=stop)
                else:
                    segments.append(Segment(source.rank, place, stop))
                if source.rank == self._rank:
                    local, columns = self._local[name, source.block], 0
                    if item.part is not None:
                        local = _Part(local, item.slot.shape, item.part)
                        columns = local.columns
                    if own and (own[-1].stop, own[-1].dtype, own[-1].columns) == (place, dtype, columns):
                        own[-1] = replace(own[-1], stop=stop, blocks=[*own[-1].blocks, local])
                    else:
                        own.append(_Own(place, stop, dtype, [local], columns))
                place = stop
        self._own.append(own)
        slots = tuple(item.slot for item in items)
        self.layouts.append(BucketLayout(slots, tuple(segments), _end(items), items[0].share))


class _Part:
    """Rows, or columns, of a matrix that this rank has. Cut anew only where the matrix is in other memory."""

    def __init__(self, matrix: Callable[[], torch.Tensor], shape: tuple[int, ...], part: Block) -> None:
        self._matrix, self._shape = matrix, shape
        self._where = tuple(slice(*span) for span in part)
        self.columns = 0 if part[1] == (0, shape[1]) else part[1][1] - part[1][0]
        """See `_Own.columns`."""
        self._view: torch.Tensor | None = None
        self._memory = 0

    def __call__(self) -> torch.Tensor:
        matrix = self._matrix()
        if self._view is None or self._memory != matrix.data_ptr():
            view = matrix.view(self._shape)[self._where]
            self._view, self._memory = view if self.columns else view.view(-1), matrix.data_ptr()
        return self._view


def _end(items: Sequence[_Item]) -> int:
    """Bytes that these take in a bucket."""
    return items[-1].slot.offset + items[-1].slot.nbytes if items else 0


def by_matrix(names: Iterable[str]) -> list[str]:
    """The model's order, but the experts of a layer one matrix after another: all gate projections, all up projections
    and so on. The same under every layout."""
    first: dict[str, int] = {}

    def place(numbered: tuple[int, str]) -> tuple[int, int, int]:
        index, name = numbered
        match = _EXPERT_TENSOR.fullmatch(name)
        if match is None:
            return index, 0, 0
        layer, number, matrix = match.groups()
        return first.setdefault(layer, index), first.setdefault(layer + matrix, index), int(number)

    return [name for _, name in sorted(enumerate(names), key=place)]


def by_whole(names: Iterable[str], whole: Mapping[str, str]) -> list[str]:
    """The model's order, but the parts of what a file holds as one tensor together."""
    first: dict[str, int] = {}
    numbered = list(enumerate(names))
    place = {name: (first.setdefault(whole.get(name, name), index), index) for index, name in numbered}
    return sorted(place, key=lambda name: place[name])


def _items(
    tensors: Sequence[tuple[str, tuple[int, ...], torch.dtype]], sources: Mapping[str, Sequence[Source]]
) -> Iterator[_Item]:
    """Slots in the order given; experts that follow each other are stacked, unless expert tensor parallelism divides
    them."""
    items = []
    for name, shape, dtype in tensors:
        given = sorted(sources[name], key=lambda source: source.block)
        blocks = [source.block for source in given]
        # An expert of a stacked Hugging Face tensor has more dimensions than the parameter; blocks are of the tensor.
        whole = lies_whole(shape, blocks)
        slot = TensorSlot(name, str(dtype).removeprefix("torch."), shape, 0, () if whole else tuple(blocks))
        items.append(_Item(slot, tuple((name, source) for source in given)))
    for stack, group in groupby(items, _stack):
        together = list(group)
        yield from together if stack is None else [_stacked(stack, together)]


def _stack(item: _Item) -> str | None:
    """Name of the stack that an item belongs to."""
    match = _EXPERT_TENSOR.fullmatch(item.slot.name)
    return f"{match[1]}{EXPERT}{match[3]}" if match and len(item.sources) == 1 else None


def _stacked(name: str, items: Sequence[_Item]) -> _Item:
    matches = [_EXPERT_TENSOR.fullmatch(item.slot.name) for item in items]
    numbers = [int(match[2]) for match in matches if match]
    if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        raise RuntimeError(f"the experts of {name} do not come in order: {numbers[:8]}")
    slot = replace(items[0].slot, name=name, experts=(numbers[0], numbers[-1] + 1))
    return _Item(slot, tuple(source for item in items for source in item.sources))
