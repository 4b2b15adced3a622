"""Routers whose logits carry a bias, and how they get it."""

from __future__ import annotations

import torch
from megatron.core.transformer.moe.moe_utils import router_gating_linear
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class BiasedRouter(TopKRouter):
    """Megatron-Core's router with `logits = x W^T + b` in `moe_router_dtype`, the bias added behind the product.

    The stock class hands both to TransformerEngine's product, which reads the bias as if it had the type of the logits:
    one of bfloat16 beside logits of float32 is read past its end, and every logit is wrong (TransformerEngine issue
    3562; nothing fails). Gradients flow to x, W and b. No collectives.
    """

    def gating(self, input: Tensor) -> Tensor:
        """`[..., hidden]` to logits `[..., experts]`."""
        dtype = _DTYPES.get(self.config.moe_router_dtype or "", input.dtype)
        assert self.bias is not None
        logits: Tensor = router_gating_linear(input, self.weight, None, dtype) + self.bias.to(dtype)
        return logits


def add_router_biases(chunk: torch.nn.Module) -> None:
    """Make the routers of a newly built chunk that have a bias those of this module. Parameters stay as they are."""
    for module in chunk.modules():
        if type(module) is TopKRouter and module.bias is not None:
            module.__class__ = BiasedRouter
