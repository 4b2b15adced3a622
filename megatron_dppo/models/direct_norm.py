"""TransformerEngine's RMSNorm called directly.

Its own module runs a norm through the machinery that fuses operations with each other, although it is alone there: a
third of a millisecond of the host each time, three times a layer, where the kernel takes the device 0.05.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


def call_norms_directly(chunks: Iterable[torch.nn.Module]) -> None:
    """Make the TransformerEngine RMSNorms of newly built chunks those of this module. Parameters stay as they are."""
    for chunk in chunks:
        for module in chunk.modules():
            kind: Any = type(module)
            if kind.__name__ == "RMSNorm" and kind.__module__.startswith("transformer_engine."):
                module.__class__ = _direct(kind)


@functools.cache
def _direct(stock: Any) -> Any:
    class DirectRMSNorm(stock):
        def forward(self, x: Tensor, *extra: Any, **options: Any) -> Tensor:
            weight = self.weight
            if extra or options or x.dtype != weight.dtype or weight.ndim != 1 or torch.is_autocast_enabled():
                result: Tensor = super().forward(x, *extra, **options)
                return result
            normed: Tensor = _RMSNorm.apply(x, weight, self.eps, self.zero_centered_gamma, self._sm_margins)
            return normed

    return DirectRMSNorm


class _RMSNorm(torch.autograd.Function):
    """``y = w x / sqrt(mean(x^2) + epsilon)`` over the last dimension, or with 1 + w; float32 inside.

        x  `[..., H]`, w `[H]`, of one type

    Gradients flow to both, by the same kernels as the module's. No collectives: under sequence parallelism the
    gradient of w is a rank's part.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Float[Tensor, "*rows H"], weight: Float[Tensor, " H"], epsilon: float, centred: bool, margins: Any
    ) -> Float[Tensor, "*rows H"]:
        from transformer_engine.pytorch.constants import TE_DType
        from transformer_engine_torch import rmsnorm_fwd

        rows = x.contiguous().view(-1, weight.shape[0])
        y, _, inverse = rmsnorm_fwd(
            rows, weight, epsilon, None, None, TE_DType[weight.dtype], margins["forward"], centred
        )
        ctx.save_for_backward(rows, inverse, weight)
        ctx.centred, ctx.margin = centred, margins["backward"]
        result: Tensor = y.view(x.shape)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Float[Tensor, "*rows H"]) -> tuple[Tensor | None, ...]:
        from transformer_engine_torch import rmsnorm_bwd

        rows, inverse, weight = ctx.saved_tensors
        dx, dw = rmsnorm_bwd(grad.contiguous().view(rows.shape), rows, inverse, weight, ctx.margin, ctx.centred)
        return dx.view(grad.shape), dw, None, None, None
