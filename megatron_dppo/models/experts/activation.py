"""Gated SiLU times the router's probability: one kernel forward, one backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

_ROWS = 8
"""Rows of a program, which walks along them."""


class WeightedSwiGLU(torch.autograd.Function):
    """``silu(gate) * up * probability`` row by row, computed in float32 and rounded once to the input's type.

        gate_up      `[T, 2 F]`, gate left of up
        probability  float32 `[T]`
        result       `[T, F]`

    Gradients flow to both. Kept for the backward: the inputs. On CPUs plain tensor operations of the same arithmetic.
    """

    @staticmethod
    def forward(ctx: Any, gate_up: Float[Tensor, "T F2"], probability: Float[Tensor, " T"]) -> Float[Tensor, "T F"]:
        ctx.save_for_backward(gate_up, probability)
        out = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
        weighted_swiglu(gate_up, probability, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Float[Tensor, "T F"]) -> tuple[Tensor, Tensor]:
        gate_up, probability = ctx.saved_tensors
        rows, width = grad.shape
        if not grad.is_cuda:
            exact = _exact(gate_up)
            gate, up = gate_up.to(exact).chunk(2, dim=-1)
            sigmoid, outer = torch.sigmoid(gate), grad.to(exact)
            inner = outer * probability[:, None]
            d_gate = inner * up * sigmoid * (1 + gate * (1 - sigmoid))
            d_up = inner * gate * sigmoid
            d_probability = (outer * gate * sigmoid * up).sum(-1)
            return torch.cat([d_gate, d_up], -1).to(gate_up.dtype), d_probability.to(probability.dtype)
        d_gate_up, d_probability = torch.empty_like(gate_up), torch.empty_like(probability)
        if rows:
            from megatron_dppo.models.experts import activation_kernels

            activation_kernels.backward[(-(-rows // _ROWS),)](
                grad.contiguous(),
                gate_up.contiguous(),
                probability.contiguous(),
                d_gate_up,
                d_probability,
                rows,
                width,
                ROWS=_ROWS,
            )
        return d_gate_up, d_probability


def weighted_swiglu(
    gate_up: Float[Tensor, "T F2"], probability: Float[Tensor, " T"], out: Float[Tensor, "T F"]
) -> None:
    """`WeightedSwiGLU` of the inputs into `out`, which is contiguous; no gradients."""
    rows, width = out.shape
    if not gate_up.is_cuda:
        gate, up = gate_up.to(_exact(gate_up)).chunk(2, dim=-1)
        out.copy_(F.silu(gate) * up * probability[:, None])
    elif rows:
        from megatron_dppo.models.experts import activation_kernels

        activation_kernels.forward[(-(-rows // _ROWS),)](
            gate_up.contiguous(), probability.contiguous(), out, rows, width, ROWS=_ROWS
        )


def recompute_for_backward(output: Tensor, made: Tensor, again: Callable[[Tensor], object]) -> None:
    """Free `made`, of which `output` was made, until `output`'s gradient is there: whoever keeps it for the backward
    keeps an empty storage, which `again` fills, given `made`, before it is read. The storage is `made`'s alone."""
    storage, kept = made.untyped_storage(), made.data  # not `detach()`: autograd would notice that it is written to
    size = storage.nbytes()
    storage.resize_(0)

    def refill(grad: Tensor) -> None:
        storage.resize_(size)
        with torch.no_grad():
            again(kept)

    output.register_hook(refill)


def _exact(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
