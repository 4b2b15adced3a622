"""The decoder's layer spec, and its RMSNorm, without TransformerEngine."""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dppo.compat.packed_attention import PackedAttention


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


def local_block_spec(
    config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None
) -> TransformerBlockSubmodules:
    """Megatron-Core's local spec for the layers of one pipeline stage, with attention that knows packed sequences and
    a norm that knows sequence parallelism. Experts run one after another (no grouped GEMM without a GPU)."""
    stock = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage, pp_rank=pp_rank
    )
    layers = []
    for stock_layer in stock.layer_specs:
        layer = copy.deepcopy(stock_layer)
        layer.submodules.input_layernorm = TorchRMSNorm
        layer.submodules.pre_mlp_layernorm = TorchRMSNorm
        if getattr(layer.submodules.mlp, "func", None) is MoELayer:
            # Only a dense MLP's norm is part of its first matrix with TransformerEngine, and checkpoints have its names
            del layer.submodules.sharded_state_dict_keys_map["pre_mlp_layernorm."]
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = PackedAttention
        if attention.q_layernorm not in (None, IdentityOp):
            attention.q_layernorm = attention.k_layernorm = TorchRMSNorm
        layers.append(layer)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=TorchRMSNorm)
