"""DeepSeek-V3, R1, V3.1 and Moonlight, and under another name Kimi-K2: latent attention, sigmoid scores with a
correction bias, the choice limited to groups of experts, shared experts, dense first layers."""

from typing import Any

from transformers import PreTrainedConfig

from megatron_dppo.errors import UserError
from megatron_dppo.models.architecture import Architecture
from megatron_dppo.models.families.decoder import UNTIED, decoder, further_layers, latent, sigmoid_moe, words
from megatron_dppo.models.families.tables import (
    DENSE_MLP,
    STACKED_EXPERTS,
    correction_bias,
    experts,
    latent_attention,
    shared_expert,
)
from megatron_dppo.models.family import Family
from megatron_dppo.models.names import Table


def _read(config: PreTrainedConfig) -> Architecture:
    for name, value in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if (said := getattr(config, name, None)) != value:
            raise UserError(f"{name} is {said!r}; vLLM goes by it, and this model type has {value!r}: set it")
    return decoder(
        config,
        mtp_layers=further_layers(config, "num_nextn_predict_layers"),
        latent=latent(config),
        moe=sigmoid_moe(config, config.first_k_dense_replace),
    )


def layer(model: Architecture, layer: int) -> Table:
    """Of decoder layer number `layer`."""
    if not model.is_moe_layer(layer):
        return {**latent_attention(model), **DENSE_MLP}
    bias = correction_bias("mlp.gate.e_score_correction_bias")
    return {**latent_attention(model), **experts(), **bias, **shared_expert()}


READS = words(
    """
        n_routed_experts num_local_experts n_shared_experts num_experts_per_tok moe_intermediate_size
        routed_scaling_factor n_group topk_group first_k_dense_replace norm_topk_prob num_nextn_predict_layers
        num_mtp_layers scoring_func topk_method q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim
        qk_head_dim
    """
)
ENGINE: dict[str, tuple[Any, ...]] = {
    "moe_layer_freq": (1,),
    "compress_ratios": (None,),
    "llama_4_scaling": (None,),
    "moe_router_dtype": (None, "float32", "bfloat16"),
}
# of DeepSeek-V3.2, whose attention is another
ENGINE |= dict.fromkeys(words("index_topk index_topk_freq index_topk_pattern index_skip_topk_offset"), ())
ENGINE |= dict.fromkeys(words("index_n_heads index_head_dim indexer_rope_interleave attn_module_list_cfg"), ())
FIXED = {"attention_bias": False, "rope_interleave": True}
SPEC = "megatron_dppo.models.layers.latent_attention:spec"

FAMILY = Family(
    model_type="deepseek_v3",
    aliases=("kimi_k2",),
    architecture="DeepseekV3ForCausalLM",
    read=_read,
    layer=layer,
    reads=READS,
    fixed=FIXED,
    engine=ENGINE,
    engine_takes=UNTIED,
    engine_scales_by_mscale=True,
    stacked=STACKED_EXPERTS,
    spec=SPEC,
)
