"""One layer of experts: both matrices, activation, probabilities and permutation, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from megatron_dppo.actor.actor import MegatronActor


class ExpertLayer:
    """The first MoE layer of an actor without its router, on tokens spread at random over the experts. Its weight
    gradients are added to `main_grad`, as in a training step."""

    def __init__(self, actor: MegatronActor, tokens: int, dtype: torch.dtype) -> None:
        self.layer: Any = next(m for m in actor.model[0].modules() if isinstance(m, MoELayer))
        config, device = self.layer.config, actor.runtime.device
        generator = torch.Generator(device).manual_seed(0)
        shape = (tokens, 1, config.hidden_size)
        self.hidden = torch.randn(shape, generator=generator, device=device, dtype=dtype, requires_grad=True)
        self.grad = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        scores = torch.rand((tokens, config.num_moe_experts), generator=generator, device=device)
        chosen = scores.topk(config.moe_router_topk, dim=1)
        self.map = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, chosen.indices, True)
        weights = torch.zeros_like(scores).scatter_(1, chosen.indices, chosen.values.softmax(-1))
        self.probabilities = weights.requires_grad_()

    def run(self) -> Tensor:
        """Forward and backward; the output."""
        self.hidden.grad = self.probabilities.grad = None
        rows, weights = self.layer.preprocess(self.hidden, self.probabilities, self.map)
        rows, weights = self.layer.dispatch(rows, weights)
        output, _ = self.layer.routed_experts_compute(rows, weights)
        output = self.layer.postprocess(self.layer.combine(output), None)
        output.backward(self.grad)
        return output

    def results(self, run: Callable[[], Tensor]) -> list[Tensor]:
        """Output and gradients, those of the weights included; the buffers are zero before."""
        parameters = list(self.layer.experts.parameters())
        for parameter in parameters:
            parameter.main_grad.zero_()
        output = run().detach().clone()
        assert self.hidden.grad is not None
        assert self.probabilities.grad is not None
        mains = torch.cat([parameter.main_grad.flatten() for parameter in parameters])
        return [output, self.hidden.grad.clone(), self.probabilities.grad.clone(), mains]


def difference(ours: list[Tensor], others: list[Tensor]) -> list[float]:
    """Norms of the differences, relative to the second list's norms."""
    pairs = zip(ours, others, strict=True)
    return [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs]
