"""Frozen weights and adapters of all experts of a layer as one product."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

_ROWS, _COLUMNS, _WARPS = 128, 64, 4
"""A program's part of the output, and its warps."""


class AdaptedGroupedLinear(torch.autograd.Function):
    """`y[t] = W_e x[t] + scale B_e A_e x[t]` for the tokens t of every expert e, sorted by expert; W is frozen.

        x      `[T, K]`, expert 0's tokens first
        ends   int32 `[E]`, on x's device: one past each expert's last token; `ends[-1] = T`
        stack  `[E, N, K]`: the frozen weights' memory
        a      `[E, parts r, K]`, and b `[E, parts, N / parts, r]`: row block p of W belongs to row block p of A

    Products accumulate in float32. On a GPU the adapter's share is added to W's rounded product, and in the backward to
    W's gradient of x, where these lie: no copy, no tensor of its own. Kept for the backward: x and `scale A x`.
    Gradients flow to x, a and b. The host waits for nothing. No collectives.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Float[Tensor, "T K"],
        ends: Int[Tensor, " E"],
        stack: Float[Tensor, "E N K"],
        a: Float[Tensor, "E R K"],
        b: Float[Tensor, "E P M r"],
        scale: float,
    ) -> Float[Tensor, "T N"]:
        ctx.stack, ctx.scale = stack, scale
        if not x.shape[0]:
            ctx.save_for_backward(x, ends, x.new_zeros((0, a.shape[1])), a, b)
            return x.new_zeros((0, stack.shape[1]))
        low = F.grouped_mm(x, a.transpose(1, 2), offs=ends).mul_(scale)
        ctx.save_for_backward(x, ends, low, a, b)
        y = F.grouped_mm(x, stack.transpose(1, 2), offs=ends)
        _add(y, low, ends, b, a_side=False)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Float[Tensor, "T N"]) -> tuple[Tensor | None, ...]:
        x, ends, low, a, b = ctx.saved_tensors
        if not x.shape[0]:
            return x.new_zeros(x.shape), None, None, a.new_zeros(a.shape), b.new_zeros(b.shape), None
        dy = dy.contiguous()
        d_low = F.grouped_mm(dy, spread(b), offs=ends).mul_(ctx.scale)
        da = F.grouped_mm(d_low.t(), x, offs=ends)
        db = _blocks(F.grouped_mm(dy.t(), low, offs=ends), b)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = F.grouped_mm(dy, ctx.stack, offs=ends)
            _add(dx, d_low, ends, a, a_side=True)
        return dx, None, None, da, db, None


def spread(b: Float[Tensor, "E P M r"]) -> Float[Tensor, "E N R"]:
    """The block-diagonal matrix of the parts of every expert's B: one product for all of them."""
    experts, parts, rows, rank = b.shape
    if parts == 1:
        return b[:, 0]
    whole = b.new_zeros((experts, parts, rows, parts, rank))
    whole.diagonal(dim1=1, dim2=3).copy_(b.permute(0, 2, 3, 1))
    return whole.view(experts, parts * rows, parts * rank)


def _blocks(whole: Float[Tensor, "E N R"], b: Float[Tensor, "E P M r"]) -> Float[Tensor, "E P M r"]:
    experts, parts, rows, rank = b.shape
    blocks = whole.view(experts, parts, rows, parts, rank).diagonal(dim1=1, dim2=3)
    return blocks.permute(0, 3, 1, 2).contiguous()


def _add(out: Tensor, low: Tensor, ends: Tensor, factor: Tensor, *, a_side: bool) -> None:
    """`out += low A` of each row's expert (a_side: factor is a), or `low B^T` (factor is b), in place."""
    parts = 1 if a_side else factor.shape[1]
    if not out.is_cuda:
        out += F.grouped_mm(low, factor if a_side else spread(factor).transpose(1, 2), offs=ends)
        return
    from megatron_dppo.models.lora.adapter_kernels import add_low_rank

    launch(add_low_rank, out, low, ends, factor, parts, a_side=a_side)


def launch(kernel: Any, out: Tensor, low: Tensor, ends: Tensor, factor: Tensor, parts: int, *, a_side: bool) -> None:
    """The kernel `adapter_kernels.add_low_rank` on these tensors."""
    import triton

    width, rank, experts = out.shape[1], low.shape[1] // parts, len(ends)
    columns = triton.cdiv(width // parts, _COLUMNS)
    kernel[(parts * columns, triton.cdiv(len(out), _ROWS) + experts)](
        out,
        low,
        factor.contiguous(),
        ends,
        width,
        *((rank * width, width, 1) if a_side else (rank * width, 1, rank)),
        low.shape[1],
        width // parts,
        experts,
        EXPERTS=triton.next_power_of_2(experts),
        RANK=rank,
        PADDED=min(128, max(16, triton.next_power_of_2(rank))),
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        num_warps=_WARPS,
    )
