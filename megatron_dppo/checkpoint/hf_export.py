"""A sharded Megatron-Core model back to Hugging Face tensors, one after another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_dppo.checkpoint.weight_buckets import Source, WeightBuckets
from megatron_dppo.checkpoint.weight_layout import extent
from megatron_dppo.models.hf_config import HFConfig
from megatron_dppo.models.live import Owned, owned_parameters
from megatron_dppo.models.names import Block, Piece, Shape

BUCKET_BYTES = 128 * 2**20


@dataclass(frozen=True)
class ExportedTensor:
    """What is known of a tensor before it is gathered."""

    name: str
    shape: Shape
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class ShardExporter:
    """Streams tensors out of their shards.

    Building it is a collective over all ranks of the world: each block of each tensor gets exactly one sender (the
    first replica of a dense parameter over data and context parallelism, of an expert over its own data parallelism),
    and the blocks must tile every tensor without gap or overlap.
    """

    def __init__(
        self,
        shards: Iterable[Owned],
        shapes: Mapping[str, Shape],
        groups: ProcessGroupCollection,
        *,
        destination: int = 0,
    ) -> None:
        """
        shards  this rank's
        shapes  of all tensors, in the order in which they are streamed
        """
        self.destination = destination
        self._rank = dist.get_rank()
        self._local: dict[tuple[str, Block], tuple[Owned, Piece]] = {}
        dtypes: dict[str, torch.dtype] = {}
        for owned in shards:
            replica = groups.expt_dp if ".mlp.experts." in owned.name else groups.dp_cp
            if replica.rank() == 0:
                for piece in owned.pieces:
                    self._local[piece.hf_name, piece.source] = (owned, piece)
                    dtypes[piece.hf_name] = owned.parameter.dtype
        published: list[tuple[list[tuple[str, Block]], dict[str, torch.dtype]]] = [([], {})] * dist.get_world_size()
        dist.all_gather_object(published, (list(self._local), dtypes))
        self._sources: dict[str, list[Source]] = {name: [] for name in shapes}
        taken: set[tuple[str, Block]] = set()
        for rank, (blocks, rank_dtypes) in enumerate(published):
            dtypes |= rank_dtypes
            for name, block in blocks:
                if (name, block) not in taken:  # norms on every tensor-parallel rank, tied embeddings on two stages
                    taken.add((name, block))
                    self._sources[name].append(Source(rank, block))
        for name, shape in shapes.items():
            check_tiling(name, shape, [source.block for source in self._sources[name]])
        self.tensors = [ExportedTensor(name, shape, dtypes[name]) for name, shape in shapes.items()]

    def buckets(self, bucket_bytes: int) -> WeightBuckets:
        """The model as byte buckets for a weight sync; planned without communication, the same on every rank."""
        tensors = [(tensor.name, tensor.shape, tensor.dtype) for tensor in self.tensors]
        local = {key: partial(owned.block, piece) for key, (owned, piece) in self._local.items()}
        return WeightBuckets(tensors, self._sources, local, rank=self._rank, bucket_bytes=bucket_bytes)

    def stream(
        self, *, dtype: torch.dtype | None = None, bucket_bytes: int = BUCKET_BYTES
    ) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Every tensor in a fixed order, whole, in `dtype` (default: the parameters').

        A collective: every rank of the world iterates to the end. The destination rank (default: rank 0) gets
        `(name, tensor)` on the parameters' device, the others `(name, None)`. Tensors travel in buckets of at most
        `bucket_bytes` (or one tensor, where it is larger), point to point, so the destination needs two buckets beside
        its shard and a sender one; a layer's experts are never all in one place. No gradients.
        """
        for bucket in self._buckets(dtype, bucket_bytes):
            gathered = self._gather(bucket)
            for tensor in bucket:
                yield tensor.name, gathered.pop(tensor.name, None)

    def _buckets(self, dtype: torch.dtype | None, bucket_bytes: int) -> Iterator[list[ExportedTensor]]:
        bucket: list[ExportedTensor] = []
        for tensor in self.tensors:
            wanted = ExportedTensor(tensor.name, tensor.shape, dtype or tensor.dtype)
            size = sum(t.nbytes for t in bucket) + wanted.nbytes
            if bucket and (size > bucket_bytes or wanted.dtype != bucket[0].dtype):
                yield bucket
                bucket = []
            bucket.append(wanted)
        if bucket:
            yield bucket

    @torch.no_grad()
    def _gather(self, bucket: list[ExportedTensor]) -> dict[str, torch.Tensor]:
        if self._rank != self.destination:
            mine = [self._block(t, s) for t in bucket for s in self._sources[t.name] if s.rank == self._rank]
            if mine:
                dist.send(torch.cat([block.reshape(-1) for block in mine]), dst=self.destination)
            return {}
        sizes: dict[int, int] = {}
        for tensor in bucket:
            for source in self._sources[tensor.name]:
                if source.rank != self._rank:
                    sizes[source.rank] = sizes.get(source.rank, 0) + prod(extent(source.block))
        device = next(iter(self._local.values()))[0].parameter.device
        received = {rank: torch.empty(size, dtype=bucket[0].dtype, device=device) for rank, size in sizes.items()}
        for request in [dist.irecv(buffer, src=rank) for rank, buffer in received.items()]:
            assert request is not None  # None is for ranks outside the group
            request.wait()
        used = dict.fromkeys(received, 0)
        result = {}
        for tensor in bucket:
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            for source in self._sources[tensor.name]:
                shape = extent(source.block)
                if source.rank == self._rank:
                    block = self._block(tensor, source)
                else:
                    start = used[source.rank]
                    used[source.rank] = start + prod(shape)
                    block = received[source.rank][start : used[source.rank]].view(shape)
                whole[tuple(slice(*span) for span in source.block)] = block
            result[tensor.name] = whole
        return result

    def _block(self, tensor: ExportedTensor, source: Source) -> torch.Tensor:
        owned, piece = self._local[tensor.name, source.block]
        return owned.block(piece).to(tensor.dtype)


class WeightExporter(ShardExporter):
    """Streams the weights of one model, its adapters merged; built once, used after every step.

    `W + scale B A` is made block by block in float32 and rounded once: the weights here stay what they are, and
    however often they are exported no rounding adds up.
    """

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        model: HFConfig,
        groups: ProcessGroupCollection,
        *,
        destination: int = 0,
    ) -> None:
        super().__init__(owned_parameters(models, model, groups), model.tensors, groups, destination=destination)


def export_weights(
    models: Sequence[torch.nn.Module],
    model: HFConfig,
    groups: ProcessGroupCollection,
    *,
    dtype: torch.dtype | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """`WeightExporter(...).stream(...)` for one use."""
    return WeightExporter(models, model, groups).stream(dtype=dtype, bucket_bytes=bucket_bytes)


def check_tiling(name: str, shape: Shape, blocks: list[Block]) -> None:
    """RuntimeError unless `blocks` cover a tensor of `shape` without gap or overlap."""
    covered = sum(prod(extent(block)) for block in blocks)
    outside = any(stop > size for block in blocks for (_, stop), size in zip(block, shape, strict=True))
    if covered != prod(shape) or outside or _overlap(blocks):
        raise RuntimeError(
            f"{name} {shape}: the ranks hold {covered} of {prod(shape)} elements in {len(blocks)} blocks; the layout "
            "and the name table disagree"
        )


def _overlap(blocks: list[Block]) -> bool:
    ordered = sorted(blocks)
    for i, first in enumerate(ordered):
        for second in ordered[i + 1 :]:
            if second[0][0] >= first[0][1]:
                break
            if all(a[0] < b[1] and b[0] < a[1] for a, b in zip(first, second, strict=True)):
                return True
    return False
