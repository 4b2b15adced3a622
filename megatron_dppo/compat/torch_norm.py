"""RMSNorm for layer specs without TransformerEngine."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


class TorchRMSNorm(torch.nn.RMSNorm):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension; input and output keep their sharding.

    Under sequence parallelism each tensor-parallel rank sees a part of the tokens, so the gradient of `weight` is
    partial: the parameter is marked `sequence_parallel`, and Megatron-Core's `finalize_model_grads` sums it over the
    tensor-parallel group (the stock torch norm refuses sequence parallelism for want of that mark).
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        if config.normalization != "RMSNorm" or config.layernorm_zero_centered_gamma:
            raise NotImplementedError(
                f"TorchRMSNorm is a plain RMSNorm; the model asks for {config.normalization} with "
                f"zero_centered_gamma={config.layernorm_zero_centered_gamma}"
            )
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
