"""GLM-4.5, GLM-4.6 and GLM-4.7 (and the smaller Air): sigmoid scores with a correction bias, a shared expert, dense
layers before the first mixture of experts."""

from transformers import PreTrainedConfig

from megatron_dppo.errors import UserError
from megatron_dppo.models.architecture import Architecture, MoE
from megatron_dppo.models.families.decoder import (
    ATTENTION,
    DENSE_MLP,
    QKV_BIAS,
    STACKED_EXPERTS,
    check_sigmoid,
    correction_bias,
    decoder,
    experts,
    further_layers,
    number,
    qk_norm,
    shared_expert,
    topk,
    whole,
    words,
)
from megatron_dppo.models.family import Family
from megatron_dppo.models.names import Table


def _moe(config: PreTrainedConfig) -> MoE:
    layers, dense = whole(config, "num_hidden_layers"), config.first_k_dense_replace
    if isinstance(dense, bool) or not isinstance(dense, int) or not 0 <= dense < layers:
        raise UserError(f"first_k_dense_replace is {dense!r}; of {layers} layers at least one must have experts")
    available, groups, chosen = whole(config, "n_routed_experts"), whole(config, "n_group"), whole(config, "topk_group")
    active, normalise = topk(config, available), bool(config.norm_topk_prob)
    check_sigmoid(active, normalise=normalise, groups=groups, group_topk=chosen, experts=available)
    return MoE(
        experts=available,
        topk=active,
        intermediate_size=whole(config, "moe_intermediate_size"),
        normalise=normalise,
        layers=tuple(layer >= dense for layer in range(layers)),
        score="sigmoid",
        bias=True,
        scaling=number(config, "routed_scaling_factor"),
        groups=1 if chosen == groups else groups,  # from all groups is without a limit
        group_topk=1 if chosen == groups else chosen,
        shared_size=whole(config, "moe_intermediate_size") * whole(config, "n_shared_experts"),
    )


def _read(config: PreTrainedConfig) -> Architecture:
    return decoder(
        config,
        qkv_bias=bool(config.attention_bias),
        qk_norm="head" if config.use_qk_norm else "none",
        partial_rotary=True,
        mtp_layers=further_layers(config, "num_nextn_predict_layers"),
        moe=_moe(config),
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
    largest={"n_routed_experts": 2**14, "num_local_experts": 2**14, "moe_intermediate_size": 2**24},
    stacked=STACKED_EXPERTS,
)
