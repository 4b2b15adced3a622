"""GLM-4.5, GLM-4.6 and GLM-4.7 (and the smaller Air): sigmoid scores with a correction bias, a shared expert, dense
layers before the first mixture of experts."""

from transformers import PreTrainedConfig

from megatron_dppo.models.architecture import Architecture
from megatron_dppo.models.families.decoder import UNTIED, decoder, further_layers, sigmoid_moe, words
from megatron_dppo.models.families.tables import (
    ATTENTION,
    DENSE_MLP,
    QKV_BIAS,
    STACKED_EXPERTS,
    correction_bias,
    experts,
    qk_norm,
    shared_expert,
)
from megatron_dppo.models.family import Family
from megatron_dppo.models.names import Table


def _read(config: PreTrainedConfig) -> Architecture:
    return decoder(
        config,
        qkv_bias=bool(config.attention_bias),
        qk_norm="head" if config.use_qk_norm else "none",
        partial_rotary=True,
        mtp_layers=further_layers(config, "num_nextn_predict_layers"),
        moe=sigmoid_moe(config, config.first_k_dense_replace),
    )


def _layer(model: Architecture, layer: int) -> Table:
    attention = {**ATTENTION, **(QKV_BIAS if model.qkv_bias else {}), **(qk_norm() if model.qk_norm == "head" else {})}
    if not model.is_moe_layer(layer):
        return {**attention, **DENSE_MLP}
    return {**attention, **experts(), **correction_bias("mlp.gate.e_score_correction_bias"), **shared_expert()}


FAMILY = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    read=_read,
    layer=_layer,
    reads=words(
        """
            n_routed_experts num_local_experts n_shared_experts num_experts_per_tok moe_intermediate_size
            routed_scaling_factor n_group topk_group first_k_dense_replace norm_topk_prob attention_bias use_qk_norm
            num_nextn_predict_layers num_mtp_layers
        """
    ),
    engine_takes=UNTIED,
    stacked=STACKED_EXPERTS,
)
