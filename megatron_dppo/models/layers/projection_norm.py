"""RMSNorm over all heads of a query or key projection, which tensor parallelism divides."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.nn.functional import all_reduce

from megatron_dppo.models.architecture import Architecture


class ProjectionRMSNorm(torch.nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight`, the mean over all `heads` of a token.

    x       `[..., local heads, head_dim]`: rank r of the group has its share of the heads; with fewer heads than ranks
            each head is on several consecutive ones, as Megatron-Core divides key heads
    weight  `[heads * head_dim]`, whole on every rank

    Collective: a sum of squares, float32 `[..., 1, 1]`, is all-reduced over the group; in the backward its gradient is.
    The gradient of `weight` is that of this rank's heads (zero elsewhere): a part, which Megatron-Core's
    `finalize_model_grads` sums over the group, as it does for every `q_layernorm` and `k_layernorm`. A weight divided
    among the ranks would come out wrong there.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        heads: int,
        group: ProcessGroup,
        **unused: Any,
    ) -> None:
        """`hidden_size` is of one head, as Megatron-Core passes it."""
        super().__init__()
        device = torch.get_default_device()
        if device.type == "cpu" and not config.use_cpu_initialization:
            device = torch.device("cuda", torch.cuda.current_device())
        self.weight = torch.nn.Parameter(torch.ones(heads * hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps, self.heads, self.group = eps, heads, group

    def forward(self, x: Tensor) -> Tensor:
        """Same shape, dtype and sharding as `x`."""
        ranks, rank = self.group.size(), self.group.rank()
        local, width = x.shape[-2:]
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = exact.square().sum(dim=(-2, -1), keepdim=True)
        if ranks > 1:
            # `ranks * local` is a multiple of `heads` where a head is on several ranks
            squares = all_reduce(squares, group=self.group) * (self.heads / (ranks * local))
        normed = (exact * torch.rsqrt(squares / (self.heads * width) + self.eps)).to(x.dtype)
        first = rank * self.heads // ranks
        return normed * self.weight.view(self.heads, width)[first : first + local]


def spec(block: TransformerBlockSubmodules, model: Architecture, groups: ProcessGroupCollection) -> None:
    """Put it into the attention of every layer."""
    for layer in block.layer_specs or ():
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = partial(ProjectionRMSNorm, heads=model.heads, group=groups.tp)
        attention.k_layernorm = partial(ProjectionRMSNorm, heads=model.kv_heads, group=groups.tp)
