"""A sharded Megatron-Core model back to Hugging Face tensors, one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_dppo.checkpoint.weight_buckets import Source, WeightBuckets, by_matrix, by_whole
from megatron_dppo.checkpoint.weight_layout import extent, unpack
from megatron_dppo.models.hf_config import HFConfig
from megatron_dppo.models.live import Owned, owned_parameters
from megatron_dppo.models.names import Block, Piece, Range, Shape, is_expert

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


class _Local:
    """A block that this rank sends, as one row of numbers. A view of a parameter is made once, and again when the
    parameter has other memory: ten thousands of experts' matrices would take longer to cut out at every sync than to
    send."""

    def __init__(self, owned: Owned, piece: Piece) -> None:
        self._owned, self._piece = owned, piece
        self._view: torch.Tensor | None = None
        self._ahead = 0
        """Bytes from the parameter to the view, wherever their memory is."""

    def __call__(self) -> torch.Tensor:
        view, parameter = self._view, self._owned.parameter
        if view is not None and view.data_ptr() - parameter.data_ptr() == self._ahead:
            return view
        block = self._owned.block(self._piece)
        if self._owned.adapter is None and block.is_contiguous():
            self._view = block.view(-1)
            self._ahead = block.data_ptr() - parameter.data_ptr()
        return block.reshape(-1)


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
        written_in: Mapping[str, str] | None = None,
    ) -> None:
        """
        shards      this rank's
        shapes      of all tensors, in the model's order
        written_in  what each tensor is a part of (`HFConfig.written_in`): such parts come one after another. Default:
                    experts matrix by matrix
        """
        self._rank = dist.get_rank()
        self._local: dict[tuple[str, Block], Callable[[], torch.Tensor]] = {}
        dtypes: dict[str, torch.dtype] = {}
        # A rank may be without shards: of adapters, where its pipeline stage has none.
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        for owned in shards:
            self._device = owned.parameter.device
            replica = groups.expt_dp if is_expert(owned.name) else groups.dp_cp
            if replica.rank() == 0:
                for piece in owned.pieces:
                    self._local[piece.hf_name, piece.source] = _Local(owned, piece)
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
        ordered = by_matrix(shapes) if written_in is None else by_whole(shapes, written_in)
        self.tensors = [ExportedTensor(name, shapes[name], dtypes[name]) for name in ordered]
        """In the order in which they are streamed."""

    def buckets(self, bucket_bytes: int, shares: int = 1, *, sliced: bool = False) -> WeightBuckets:
        """The model as byte buckets for a weight sync, to engines whose experts `shares` workers divide (`sliced`: each
        of them); planned without communication, the same on every rank."""
        tensors = [(tensor.name, tensor.shape, tensor.dtype) for tensor in self.tensors]
        return WeightBuckets(
            tensors,
            self._sources,
            self._local,
            rank=self._rank,
            bucket_bytes=bucket_bytes,
            shares=shares,
            sliced=sliced,
        )

    def stream(self, *, bucket_bytes: int = BUCKET_BYTES) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Every tensor in the order of `tensors`, whole, in its parameter's dtype.

        A collective: every rank of the world iterates to the end. Rank 0 gets `(name, tensor)` on the parameters'
        device, the others `(name, None)`. Tensors travel in buckets of at most `bucket_bytes` (or one tensor, where it
        is larger), point to point, so rank 0 needs two buckets beside its shard and a sender one; a layer's experts are
        never all in one place. No gradients.
        """
        buckets = self.buckets(bucket_bytes)
        for index, layout in enumerate(buckets.layouts):
            # Memory of its own for each: who iterates may keep what it got.
            payload = torch.empty(layout.size, dtype=torch.uint8, device=self._device)
            buckets.gather(index, payload)
            if self._rank != 0:
                yield from ((name, None) for slot in layout.slots for name in slot.names())
                continue
            for slot, tensor in unpack(layout.slots, payload):
                yield from zip(slot.names(), tensor if slot.experts else [tensor], strict=True)


def weight_exporter(
    models: Sequence[torch.nn.Module], model: HFConfig, groups: ProcessGroupCollection, *, in_files: bool = False
) -> ShardExporter:
    """Of the weights of one model, its adapters merged; built once, used after every step.

    `W + scale B A` is made block by block in float32 and rounded once: the weights here stay what they are, and
    however often they are exported no rounding adds up. `in_files`: tensors come in the order in which a checkpoint's
    files hold them.
    """
    written_in = model.written_in if in_files and model.written_in else None
    return ShardExporter(owned_parameters(models, model, groups), model.tensors, groups, written_in=written_in)


def check_tiling(name: str, shape: Shape, blocks: list[Block]) -> None:
    """RuntimeError unless `blocks` cover a tensor of `shape` without gap or overlap."""
    covered = sum(prod(extent(block)) for block in blocks)
    outside = any(span[1] > size for block in blocks for span, size in zip(block, shape, strict=True))
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
            if all(_meet(a, b) for a, b in zip(first, second, strict=True)):
                return True
    return False


def _meet(a: Range, b: Range) -> bool:
    """Whether two ranges, of one step where they have some, have a number in common."""
    step = a[2] if len(a) > 2 else 1
    if a[2:] != b[2:]:
        return not set(range(*a)).isdisjoint(range(*b))
    return a[0] < b[1] and b[0] < a[1] and (a[0] - b[0]) % step == 0
