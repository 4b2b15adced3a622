"""What gpt-oss's experts have beside their products: biases, and a clamped SwiGLU. A kernel forward, one backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from megatron_dppo.models.experts.grouped import added, main_grads

_ROWS, _COLUMNS, _WARPS = 32, 64, 4
"""Rows of a program, columns that it takes at a time, and its warps."""


class ClampedSwiGLU(torch.autograd.Function):
    """``g sigmoid(1.702 g) (u + offset) probability`` row by row, where ``[g, u] = gate_up + bias`` of its expert, g at
    most `clamp` and u from `-clamp` to it; computed in float32 and rounded once to the input's type.

        gate_up      `[T, 2 F]`, gate left of up, expert 0's rows first
        probability  float32 `[T]`
        ends         int32 `[E]`, on the rows' device: one past each expert's last row; `ends[-1] = T`
        bias         `[E, 2 F]`: the values of `biases`
        add          as in `GroupedLinear`, whose rule for `main_grad` holds for the biases
        biases       E parameters `[2 F]`
        result       `[T, F]`

    Gradients flow to gate_up, probability and biases (summed in float32, in one order); a clamped number has none, one
    at the limit has. Kept for the backward: the inputs. The host waits for nothing. No collectives.
    """

    @staticmethod
    def forward(
        ctx: Any,
        gate_up: Float[Tensor, "T F2"],
        probability: Float[Tensor, " T"],
        ends: Int[Tensor, " E"],
        bias: Float[Tensor, "E F2"],
        clamp: float,
        offset: float,
        add: bool,
        *biases: Float[Tensor, " F2"],
    ) -> Float[Tensor, "T F"]:
        gate_up, probability = gate_up.contiguous(), probability.contiguous()
        ctx.save_for_backward(gate_up, probability, ends, bias)
        ctx.clamp, ctx.offset, ctx.add, ctx.biases = clamp, offset, add, biases
        out = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
        clamped_swiglu(gate_up, probability, ends, bias, clamp, offset, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Float[Tensor, "T F"]) -> tuple[Tensor | None, ...]:
        from megatron_dppo.models.experts.biased_kernels import activation_backward

        gate_up, probability, ends, bias = ctx.saved_tensors
        d_gate_up, d_probability = torch.empty_like(gate_up), torch.empty_like(probability)
        sums = _tile_sums(gate_up, ends)
        inputs = (grad.contiguous(), gate_up, bias, probability, d_gate_up, d_probability, sums, ctx.clamp, ctx.offset)
        _launch(activation_backward, inputs, ends, grad.shape[1], len(sums))
        return d_gate_up, d_probability, None, None, None, None, None, *_of_biases(ctx, sums, ends)


def clamped_swiglu(
    gate_up: Float[Tensor, "T F2"],
    probability: Float[Tensor, " T"],
    ends: Int[Tensor, " E"],
    bias: Float[Tensor, "E F2"],
    clamp: float,
    offset: float,
    out: Float[Tensor, "T F"],
) -> None:
    """`ClampedSwiGLU` of the inputs into `out`; all are contiguous; no gradients."""
    from megatron_dppo.models.experts.biased_kernels import activation

    _launch(activation, (gate_up, bias, probability, out, clamp, offset), ends, out.shape[1], _tiles(out, ends))


class AddBias(torch.autograd.Function):
    """`y[t] += probability[t] bias_e` for the rows t of every expert e, in place, in float32, rounded once.

    y is `[T, N]`, bias `[E, N]`, the rest as in `ClampedSwiGLU`. Gradients flow to y, probability and biases.
    """

    @staticmethod
    def forward(
        ctx: Any,
        y: Float[Tensor, "T N"],
        probability: Float[Tensor, " T"],
        ends: Int[Tensor, " E"],
        bias: Float[Tensor, "E N"],
        add: bool,
        *biases: Float[Tensor, " N"],
    ) -> Float[Tensor, "T N"]:
        from megatron_dppo.models.experts.biased_kernels import add_bias

        probability = probability.contiguous()
        ctx.save_for_backward(probability, ends, bias)
        ctx.add, ctx.biases = add, biases
        ctx.mark_dirty(y)
        _launch(add_bias, (y, bias, probability), ends, y.shape[1], _tiles(y, ends))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Float[Tensor, "T N"]) -> tuple[Tensor | None, ...]:
        from megatron_dppo.models.experts.biased_kernels import add_bias_backward

        probability, ends, bias = ctx.saved_tensors
        dy, d_probability = dy.contiguous(), torch.empty_like(probability)
        sums = _tile_sums(dy, ends)
        _launch(add_bias_backward, (dy, bias, probability, d_probability, sums), ends, dy.shape[1], len(sums))
        return dy, d_probability, None, None, None, *_of_biases(ctx, sums, ends)


def _of_biases(ctx: Any, sums: Tensor, ends: Tensor) -> Sequence[Tensor | None]:
    from megatron_dppo.models.experts.biased_kernels import sum_tiles

    biases, width = ctx.biases, sums.shape[1]
    if not biases[0].requires_grad:
        return [None] * len(biases)
    total = sums.new_empty((len(biases), width))
    _launch(sum_tiles, (sums, total), ends, width, len(biases), -(-width // _COLUMNS))
    mains = main_grads(biases, ctx.add)
    if mains is None:
        return total.to(biases[0].dtype).unbind()
    torch._foreach_add_(mains, list(total.unbind()))
    return added(biases)


def _tiles(rows: Tensor, ends: Tensor) -> int:
    """As many tiles as there can be: the host does not know where experts end."""
    return -(-len(rows) // _ROWS) + len(ends)


def _tile_sums(rows: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty((_tiles(rows, ends), rows.shape[1]), dtype=torch.float32)


def _launch(kernel: Any, inputs: tuple[Any, ...], ends: Tensor, width: int, *programs: int) -> None:
    import triton

    experts = len(ends)
    sizes = {"EXPERTS": triton.next_power_of_2(experts), "ROWS": _ROWS, "COLUMNS": _COLUMNS}
    kernel[programs](*inputs, ends, width, experts, **sizes, num_warps=_WARPS)
