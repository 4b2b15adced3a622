"""Qwen3-Next (80B-A3B): of four layers three have the gated delta rule and one gated attention, all of them experts
beside a gated shared one."""

from transformers import PreTrainedConfig

from megatron_dppo.errors import UserError
from megatron_dppo.models.architecture import Architecture, DeltaRule, MoE
from megatron_dppo.models.families.decoder import (
    ATTENTION,
    DELTA_RULE,
    DENSE_MLP,
    STACKED_EXPERTS,
    decoder,
    experts,
    qk_norm,
    shared_expert,
    topk,
    whole,
    words,
)
from megatron_dppo.models.family import Family
from megatron_dppo.models.names import Table


def _delta(config: PreTrainedConfig, layers: int) -> DeltaRule | None:
    kinds = config.layer_types
    if len(kinds) != layers:
        raise UserError(f"layer_types has {len(kinds)} entries for num_hidden_layers {layers}")
    keys, values = whole(config, "linear_num_key_heads"), whole(config, "linear_num_value_heads")
    if values % keys:
        raise UserError(f"linear_num_value_heads {values} is not a multiple of linear_num_key_heads {keys}")
    if "linear_attention" not in kinds:
        return None
    return DeltaRule(
        layers=tuple(kind == "linear_attention" for kind in kinds),
        key_heads=keys,
        value_heads=values,
        key_dim=whole(config, "linear_key_head_dim"),
        value_dim=whole(config, "linear_value_head_dim"),
        convolution=whole(config, "linear_conv_kernel_dim"),
    )


def _moe(config: PreTrainedConfig, layers: int) -> MoE:
    number, step, dense = whole(config, "num_experts"), whole(config, "decoder_sparse_step"), config.mlp_only_layers
    sparse = tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))
    if not any(sparse):
        raise UserError("decoder_sparse_step and mlp_only_layers leave no expert layer, which is not supported")
    return MoE(
        experts=number,
        topk=topk(config, number),
        intermediate_size=whole(config, "moe_intermediate_size"),
        normalise=bool(config.norm_topk_prob),
        layers=sparse,
        shared_size=whole(config, "shared_expert_intermediate_size"),
        shared_gate=True,
    )


def _read(config: PreTrainedConfig) -> Architecture:
    layers = whole(config, "num_hidden_layers")
    return decoder(
        config,
        qk_norm="head",
        partial_rotary=True,
        output_gate=True,
        centred_norms=True,
        delta=_delta(config, layers),
        moe=_moe(config, layers),
    )


def _layer(model: Architecture, layer: int) -> Table:
    mixer = DELTA_RULE if model.is_delta_layer(layer) else {**ATTENTION, **qk_norm()}
    if not model.is_moe_layer(layer):
        return {**mixer, **DENSE_MLP}
    return {**mixer, **experts(), **shared_expert("shared_expert", gate="shared_expert_gate")}


FAMILY = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    read=_read,
    layer=_layer,
    reads=words(
        """
            num_experts num_local_experts num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size
            norm_topk_prob decoder_sparse_step mlp_only_layers full_attention_interval linear_conv_kernel_dim
            linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads
        """
    ),
    fixed={"attention_bias": False},
    largest=dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 2**24)
    | dict.fromkeys(
        words(
            """
                num_experts num_local_experts linear_num_key_heads linear_num_value_heads linear_key_head_dim
                linear_value_head_dim linear_conv_kernel_dim
            """
        ),
        2**14,
    ),
    stacked=STACKED_EXPERTS,
    carried=("mtp.",),
    # vLLM makes every fourth layer one of attention where layer_types does not say
    engine={"full_attention_interval": (4,), "attn_output_gate": (True,)}
    | {"layer_scale": (None, False), "qkv_bias": (None, False), "mlp_layer_types": (None,)},
    spec="megatron_dppo.models.layers.gated_delta:spec",
)
