"""One adapter module: the A and B of a linear layer, or of all experts of a grouped one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_dppo.models.lora.config import LoraConfig
from megatron_dppo.models.lora.grouped import AdaptedGroupedLinear
from megatron_dppo.models.lora.sites import LocalSite, a_pieces, b_pieces
from megatron_dppo.models.lora.size import GROUPED_ROW_BYTES
from megatron_dppo.models.names import Block, Piece


@dataclass(frozen=True)
class Sharding:
    """How the layer that an adapter belongs to is divided."""

    group: ProcessGroup
    """Ranks that share the weight: tensor-parallel, or expert-tensor-parallel for experts."""
    input_sharded: bool
    """Each rank has columns of the weight (row-parallel) in place of rows (column-parallel)."""
    expert: bool
    """Tokens come from and go to Megatron-Core's dispatcher, which communicates for the layer."""
    sequence_parallel: bool
    """Outside the layer every rank has a part of the tokens."""


class LoraAdapter(torch.nn.Module):
    """`y + scale B A x` for a layer `y = W x`, sharded as W is.

        a   `[E, n r, in]`          A of the n projections that W stacks, one below the other
        b   `[E, parts, rows, r]`   B, row for row as in W; row i multiplies the `A x` of the projection it belongs to

    E is 1, or the number of experts of a grouped layer. W's rows are `parts` blocks of `rows`: gate and up are two,
    so that every block is divided evenly over ranks. Sharding over the group's ranks, and its collectives:

        column-parallel   a whole, b by rows. `A x` (r numbers a token, not `in`) is gathered over the tokens under
                          sequence parallelism, with a reduce-scatter in the backward; else its gradient is all-reduced.
        row-parallel      a by columns, b whole. The partial `A x` is reduced (-scattered) before B.
        experts           none: the dispatcher reduces outputs and input gradients. What is whole on every rank has a
                          partial gradient there, which is all-reduced in each backward where the group has several.

    Under sequence parallelism the gradient of what is whole is partial too: the parameter is marked, and
    Megatron-Core's `finalize_model_grads` sums it. With B zero the output is y to the bit.
    """

    _belongs: Tensor
    off = False
    """Whether the layer is what it is without this adapter, for a pass of the model that training began with."""

    def __init__(
        self, local: Sequence[LocalSite], config: LoraConfig, sharding: Sharding, like: torch.nn.Parameter
    ) -> None:
        """
        local  the weight matrices of the layer: one, or its experts'
        like   one of its weights, for device, dtype and the group its gradient is reduced over
        """
        super().__init__()
        rows, cols = local[0].owned.shape
        rank, kinds = config.rank, len(local[0].site.sources)
        self.scale, self.rank, self.sharding = config.scale, rank, sharding
        self.local = tuple(local)
        self._index = {tensor: i for i, one in enumerate(local) for tensor in one.site.sources}
        self._kind = {tensor: kind for one in local for kind, tensor in enumerate(one.site.sources)}
        self.parts = 2 if "linear_fc1" in local[0].site.name else 1
        self.a = torch.nn.Parameter(like.new_zeros(len(local), kinds * rank, cols))
        self.b = torch.nn.Parameter(like.new_zeros(len(local), self.parts, rows // self.parts, rank))
        belongs = like.new_zeros(rows, kinds)
        for piece in local[0].owned.pieces:
            start, stop = piece.local[0]
            belongs[start:stop, self._kind[piece.hf_name]] = 1
        self.register_buffer("_belongs", belongs, persistent=False)
        for parameter, sharded in ((self.a, sharding.input_sharded), (self.b, not sharding.input_sharded)):
            parameter.allreduce = getattr(like, "allreduce", True)  # type: ignore[attr-defined]
            parameter.tensor_model_parallel = sharded and sharding.group.size() > 1  # type: ignore[attr-defined]
            parameter.sequence_parallel = sharding.sequence_parallel and not sharded and not sharding.expert  # type: ignore[attr-defined]

    def pieces(self) -> tuple[tuple[torch.nn.Parameter, list[Piece]], tuple[torch.nn.Parameter, list[Piece]]]:
        """The parameters, and which blocks of PEFT's tensors are where in each."""
        height = self.b.shape[2]
        a = [piece for i, one in enumerate(self.local) for piece in a_pieces(one, i, self.rank)]
        b = [piece for i, one in enumerate(self.local) for piece in b_pieces(one, i, self.rank, height)]
        return (self.a, a), (self.b, b)

    def add_to(self, output: Tensor, x: Tensor) -> Tensor:
        """`output` of a layer with one weight, plus this adapter's share, where output lies; x is the layer's own input
        (normed)."""
        if self.off:
            return output
        sharding, group = self.sharding, self.sharding.group
        several = group.size() > 1
        a, b = self._factors()
        hidden = F.linear(x, a[0])
        if several and not sharding.expert:
            if sharding.input_sharded and sharding.sequence_parallel:
                hidden = reduce_scatter_to_sequence_parallel_region(hidden, group=group)
            elif sharding.input_sharded:
                hidden = reduce_from_tensor_model_parallel_region(hidden, group=group)
            elif sharding.sequence_parallel:
                hidden = gather_from_sequence_parallel_region(hidden, group=group)
            else:
                hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
        total: Tensor = _AddLowRank.apply(output, hidden, b[0], self.scale)
        return total

    def add_to_grouped(self, output: Tensor, x: Tensor, splits: Sequence[int] | Tensor) -> Tensor:
        """The same for experts whose product is TransformerEngine's loop, or that `product` does not take: rows of
        `x [T, in]` belong to expert 0, then 1, ..., `splits` of them each; or `splits` is a tensor on x's device of
        where each one's rows end, int32 `[E]`."""
        if self.off:
            return output
        a, b = self._factors()
        if not _can_group(x, self.rank):
            if isinstance(splits, Tensor):
                splits = splits.diff(prepend=splits.new_zeros(1)).tolist()
            parts = zip(output.split(list(splits)), x.split(list(splits)), a, b, strict=True)
            return torch.cat(
                [torch.addmm(y, F.linear(rows, a_), b_.t(), alpha=self.scale) for y, rows, a_, b_ in parts]
            )
        assert not isinstance(splits, Tensor), "product"
        ends = torch.tensor(splits, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        ends = ends.pin_memory().to(x.device, non_blocking=True) if x.is_cuda else ends
        hidden = F.grouped_mm(x, a.transpose(1, 2), offs=ends)
        return output + F.grouped_mm(hidden * self.scale, b.transpose(1, 2), offs=ends)

    def joins(self, x: Tensor, splits: Sequence[int] | Tensor) -> bool:
        """Whether the experts' layer leaves all to `product`: where it has the rows' ends on the device."""
        return not self.off and isinstance(splits, Tensor) and _can_group(x, self.rank)

    def product(self, x: Tensor, ends: Tensor, stack: Tensor) -> Tensor:
        """Of experts' frozen weights `stack [E, out, in]`: `W x` plus this adapter's share (`AdaptedGroupedLinear`)."""
        a, b = self._shared()
        result: Tensor = AdaptedGroupedLinear.apply(x, ends, stack, a, b, self.scale)
        return result

    def _factors(self) -> tuple[Tensor, Tensor]:
        """a, and b `[E, out, n r]` with zeros where a row of W is of another projection: one product for all."""
        a, b = self._shared()
        b = b.flatten(1, 2)
        if self._belongs.shape[1] > 1:
            b = (b.unsqueeze(2) * self._belongs.unsqueeze(2)).flatten(2)
        return a, b

    def _shared(self) -> tuple[Tensor, Tensor]:
        """a and b; of experts what is whole on every rank with its gradient summed over them."""
        a: Tensor = self.a
        b: Tensor = self.b
        if self.sharding.expert and self.sharding.group.size() > 1:
            if self.sharding.input_sharded:
                b = copy_to_tensor_model_parallel_region(b, group=self.sharding.group)
            else:
                a = copy_to_tensor_model_parallel_region(a, group=self.sharding.group)
        return a, b

    @torch.no_grad()
    def delta(self, tensor: str, local: Block) -> Tensor:
        """`scale B A` on the block `local` (rows, columns) of the weight, whose rows all are of `tensor`, in float32
        (float64 for such weights). No collectives: a rank that has rows or columns of W has those of B or A."""
        index, kind = self._index[tensor], self._kind[tensor]
        exact = torch.promote_types(self.a.dtype, torch.float32)
        rows, cols = (slice(*span) for span in local)
        a = self.a[index, kind * self.rank : (kind + 1) * self.rank, cols].to(exact)
        b = self.b[index].flatten(0, 1)[rows].to(exact)
        return self.scale * (b @ a)


class _AddLowRank(torch.autograd.Function):
    """`output + scale low B^T`, in the memory of output `[..., N]`, which nobody else may look at again.

        low  `[..., R]`, b `[N, R]`

    Torch's `addmm` would copy output first. Gradients flow to output, low and b. No collectives.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, low: Tensor, b: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(low, b)
        ctx.scale = scale
        total = output.data  # TransformerEngine gives out views, which autograd lets nobody write to
        total.view(-1, total.shape[-1]).addmm_(low.reshape(-1, low.shape[-1]), b.t(), alpha=scale)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        low, b = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        d_low = torch.mm(rows, b).mul_(ctx.scale).view(low.shape)
        return grad, d_low, torch.mm(rows.t(), low.reshape(-1, low.shape[-1])).mul_(ctx.scale), None


def _can_group(x: Tensor, rank: int) -> bool:
    """One grouped product needs 16-byte rows, and bfloat16 on a GPU; no rows at all are left to the loop."""
    if x.shape[0] == 0 or any(width * x.element_size() % GROUPED_ROW_BYTES for width in (rank, x.shape[1])):
        return False
    return x.dtype is torch.bfloat16 if x.is_cuda else x.dtype is not torch.float64
