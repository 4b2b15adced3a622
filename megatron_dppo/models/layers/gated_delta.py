"""Megatron-Core's gated delta layer in the layers that a model has it in."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_dppo.compat.torch_delta_rule import patch_delta_rule
from megatron_dppo.models.architecture import Architecture


class GatedDeltaLayer(GatedDeltaNet):
    """The formula of `architecture.DeltaRule` over packed sequences, each from a state of zeros.

    Tensor parallelism divides the heads (`names.ByKeyHead`); under context parallelism an all-to-all gives each rank
    all tokens of a share of its heads, and another one gives its tokens back.
    """

    def _compute_g_and_beta(self, a_log: Tensor, dt_bias: Tensor, alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        """`-exp(A_log) softplus(alpha + dt_bias)` and `sigmoid(beta)`. The stock one has exp(A_log) in the weights'
        type, which in bfloat16 is off by 0.4 %; transformers and vLLM have it in float32."""
        exact = torch.promote_types(alpha.dtype, torch.float32)
        return -a_log.to(exact).exp() * F.softplus(alpha.to(exact) + dt_bias), beta.sigmoid()


class HeadRMSNorm(torch.nn.RMSNorm):
    """`x / sqrt(mean(x^2) + eps) * weight` of one head, also where the model's other norms multiply by 1 + weight:
    stored less 1 it would lose digits. Under tensor parallelism its gradient is that of a rank's heads, a part which
    `finalize_model_grads` sums for the mark that it has."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **unused: Any) -> None:
        device = torch.get_default_device()
        if device.type == "cpu" and not config.use_cpu_initialization:
            device = torch.device("cuda", torch.cuda.current_device())
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def spec(block: TransformerBlockSubmodules, model: Architecture, groups: ProcessGroupCollection) -> None:
    """Put it in the place of attention. With TransformerEngine the input projection holds the layer's norm, as the
    attention's does."""
    patch_delta_rule()
    for layer in block.layer_specs or ():
        if not model.is_delta_layer(layer.metainfo["number"]):
            continue
        attention = layer.submodules.self_attention.submodules
        layer.submodules.self_attention = ModuleSpec(
            module=GatedDeltaLayer,
            submodules=GatedDeltaNetSubmodules(
                in_proj=attention.linear_qkv, out_norm=HeadRMSNorm, out_proj=attention.linear_proj
            ),
        )
        names = layer.submodules.sharded_state_dict_keys_map
        if "input_layernorm." in names:
            names["input_layernorm."] = "self_attention.in_proj.layer_norm_"
