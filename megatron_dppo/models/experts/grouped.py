"""Products of all experts of a layer with their tokens, each in one launch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from megatron_dppo.vocab_parallel.fused import HOPPER

ROW_BYTES = 16
"""Rows of the operands must be a multiple of this (`torch.nn.functional.grouped_mm`, TMA)."""
_ONE_LAUNCH = (9, 10)
"""Major compute capabilities for which `torch.nn.functional.grouped_mm` is one kernel."""
_BLOCK_N, _BLOCK_K, _DEPTH, _STAGES = 128, 256, 64, 4


def unusable(x: Tensor, weight: Tensor) -> str | None:
    """Why these tokens and a weight `[N, K]` of one expert cannot take `GroupedLinear`, or None."""
    if x.is_cuda and torch.cuda.get_device_capability(x.device)[0] not in _ONE_LAUNCH:
        return "torch's grouped product is a loop on this GPU"
    types = (torch.bfloat16,) if x.is_cuda else (torch.bfloat16, torch.float32)
    if x.dtype != weight.dtype or weight.dtype not in types:
        return f"one launch for all experts takes bfloat16, not {weight.dtype}"
    if any(width * weight.element_size() % ROW_BYTES for width in weight.shape):
        return f"rows of {tuple(weight.shape)} are no multiple of {ROW_BYTES} bytes"
    return None


def slow_paths(capability: tuple[int, int]) -> str:
    """What takes a slower path on a GPU of this compute capability than on a Hopper GPU, in words; "" for nothing."""
    if capability == HOPPER:
        return ""
    loop = "" if capability[0] in _ONE_LAUNCH else ", products of experts (one by one)"
    return (
        f"a GPU of compute capability {capability[0]}.{capability[1]} takes slower paths for log-probabilities (two to "
        f"four times the time) and gradients of experts' weights{loop}: the kernels for these are Hopper's (H100, H200)"
    )


def stacked(tensors: Sequence[Tensor]) -> Tensor | None:
    """`[E, *shape]` over E tensors of one shape that lie one after another in memory; None where they do not.

    Shares their memory, and like them stays valid where the storage is emptied and filled again.
    """
    first = tensors[0]
    address, size = first.data_ptr(), first.numel() * first.element_size()
    for number, tensor in enumerate(tensors):
        if tensor.data_ptr() != address + number * size or not tensor.is_contiguous():
            return None
    if first.untyped_storage().data_ptr() != tensors[-1].untyped_storage().data_ptr():
        return None
    return first.detach().as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))


class GroupedLinear(torch.autograd.Function):
    """`y[t] = W_e x[t]` for the tokens t of every expert e, sorted by expert.

        x         `[T, K]`, expert 0's tokens first
        ends      int32 `[E]`, on x's device: one past each expert's last token; `ends[-1] = T`
        stack     `[E, N, K]`: the weights' memory (`stacked`)
        add       whether weight gradients are added to the weights' float32 `main_grad` where they have one
        weights   E parameters `[N, K]`; one of them where none wants a gradient

    The host waits for nothing. Products accumulate in float32; y and the gradient of x are rounded once. With `add`,
    the weight gradients are not rounded at all: each weight is told so (`grad_added_to_main_grad`), and autograd gets
    a gradient that only makes DistributedDataParallel's hook run. On Hopper that is one kernel
    (`hopper_kernels.add_weight_gradients`); elsewhere a grouped product in x's type and an addition. No collectives.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Float[Tensor, "T K"],
        ends: Int[Tensor, " E"],
        stack: Float[Tensor, "E N K"],
        add: bool,
        *weights: Float[Tensor, "N K"],
    ) -> Float[Tensor, "T N"]:
        # Of frozen weights nothing: a view of no rows, `x[:0]`, would hold them all.
        ctx.save_for_backward(x if weights[0].requires_grad else x.new_empty((0, x.shape[1])), ends)
        ctx.stack, ctx.weights, ctx.add = stack, weights, add
        if not x.shape[0]:
            return x.new_zeros((0, stack.shape[1]))
        return F.grouped_mm(x, stack.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, dy: Float[Tensor, "T N"]) -> tuple[Tensor | None, ...]:
        x, ends = ctx.saved_tensors
        dy = dy.contiguous()
        dx = None
        if ctx.needs_input_grad[0]:
            dx = F.grouped_mm(dy, ctx.stack, offs=ends) if dy.shape[0] else dy.new_zeros((0, ctx.stack.shape[2]))
        weights = ctx.weights
        if not weights[0].requires_grad:
            return dx, None, None, None, *([None] * len(weights))
        mains = main_grads(weights, ctx.add)
        if mains is None:
            return dx, None, None, None, *_products(dy, x, ends).unbind()
        main = stacked(mains)
        if main is None:
            torch._foreach_add_(mains, list(_products(dy, x, ends).unbind()))
        else:
            add_weight_gradients(main, dy, x, ends)
        return dx, None, None, None, *added(weights)


def main_grads(parameters: Sequence[Any], add: bool) -> list[Tensor] | None:
    """The float32 buffers that the gradients of all these parameters are added to, if they are."""
    return [p.main_grad for p in parameters] if add and hasattr(parameters[0], "main_grad") else None


def added(parameters: Sequence[Any]) -> list[Tensor]:
    """Mark that gradients were added to `main_grad`; what autograd gets makes DistributedDataParallel's hook run."""
    for parameter in parameters:
        parameter.grad_added_to_main_grad = True
    placeholder = _placeholder(parameters[0].shape, parameters[0].dtype, parameters[0].device)
    return [placeholder.detach() for _ in parameters]


def add_weight_gradients(
    main: Float[Tensor, "E N K"], dy: Float[Tensor, "T N"], x: Float[Tensor, "T K"], ends: Int[Tensor, " E"]
) -> None:
    """`main[e] += dy[e's tokens]^T x[e's tokens]`, main in float32 and contiguous."""
    if not x.shape[0]:
        return
    if not x.is_cuda or torch.cuda.get_device_capability(x.device) != HOPPER:
        main += _products(dy, x, ends)
        return
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from megatron_dppo.models.experts import hopper_kernels

    experts, rows, columns = main.shape
    tiles_n, tiles_k = -(-rows // _BLOCK_N), -(-columns // _BLOCK_K)
    tiles = experts * tiles_n * tiles_k
    hopper_kernels.add_weight_gradients[(min(_processors(x.device), tiles),)](
        ragged_rows(dy, _DEPTH, _BLOCK_N // 2),
        TensorDescriptor.from_tensor(x, [_DEPTH, _BLOCK_K], gl.NVMMASharedLayout(128, 16, rank=2)),
        TensorDescriptor.from_tensor(main, [1, _BLOCK_N // 2, _BLOCK_K // 4], gl.NVMMASharedLayout(128, 32, rank=3)),
        ends,
        tiles,
        tiles_n,
        tiles_k,
        STAGES=_STAGES,
        num_warps=4,
    )


def ragged_rows(tensor: Float[Tensor, "T N"], rows: int, columns: int) -> Any:
    """TMA descriptor of blocks `[rows, columns]` of spans of a matrix's rows, with zeros past a span's end.

    Row r of the span that ends before row `stop` and has n rows is at `[2^30, stop, 2^30 - n + r, column]`: the third
    coordinate is out of bounds exactly from the span's end on, and the first one's stride times 2^30 is 2^64 less what
    the others are too much (addresses wrap around).
    """
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    far, stride = 1 << 30, tensor.stride(0)
    return TensorDescriptor(
        tensor,
        [0x7FFF0000, 0x7FFF0000, far, tensor.shape[1]],
        [(1 << 34) - stride, stride, stride, 1],
        [1, 1, rows, columns],
        gl.NVMMASharedLayout(128, 16, rank=4),
    )


def _products(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    if not x.shape[0]:
        return x.new_zeros((len(ends), dy.shape[1], x.shape[1]))
    return F.grouped_mm(dy.t(), x, offs=ends)


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)
