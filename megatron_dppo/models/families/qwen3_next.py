"""Qwen3-Next (80B-A3B): of four layers three have the gated delta rule and one gated attention, all of them experts
beside a gated shared one."""

from transformers import PreTrainedConfig

from megatron_dppo.errors import UserError
from megatron_dppo.models.architecture import Architecture, DeltaRule
from megatron_dppo.models.families.decoder import UNTIED, decoder, mixture, whole, words
from megatron_dppo.models.families.tables import (
    ATTENTION,
    DELTA_RULE,
    DENSE_MLP,
    STACKED_EXPERTS,
    experts,
    qk_norm,
    shared_expert,
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


def hybrid(config: PreTrainedConfig, sparse: tuple[bool, ...], *, normalise: bool = True) -> Architecture:
    """Of layers that are `sparse`, or have a dense MLP."""
    moe = None
    if any(sparse):
        shared = whole(config, "shared_expert_intermediate_size")
        moe = mixture(config, normalise=normalise, layers=sparse, shared_size=shared, shared_gate=True)
    return decoder(
        config,
        qk_norm="head",
        partial_rotary=True,
        output_gate=True,
        centred_norms=True,
        delta=_delta(config, len(sparse)),
        moe=moe,
    )


def _read(config: PreTrainedConfig) -> Architecture:
    step, dense = whole(config, "decoder_sparse_step"), config.mlp_only_layers
    sparse = tuple(i not in dense and (i + 1) % step == 0 for i in range(whole(config, "num_hidden_layers")))
    if not any(sparse):
        raise UserError("decoder_sparse_step and mlp_only_layers leave no expert layer, which is not supported")
    return hybrid(config, sparse, normalise=bool(config.norm_topk_prob))


def hybrid_layer(model: Architecture, layer: int) -> Table:
    """Its gated delta rule or gated attention, and its experts or dense MLP."""
    mixer = DELTA_RULE if model.is_delta_layer(layer) else {**ATTENTION, **qk_norm()}
    if not model.is_moe_layer(layer):
        return {**mixer, **DENSE_MLP}
    return {**mixer, **experts(), **shared_expert("shared_expert", gate="shared_expert_gate")}


DENSE_READS = words(
    """
        linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim
        full_attention_interval
    """
)
READS = DENSE_READS | words(
    """
        num_experts num_local_experts num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size
    """
)
ENGINE = {"attn_output_gate": (True,), "layer_scale": (None, False), "qkv_bias": (None, False)}
SPEC = "megatron_dppo.models.layers.gated_delta:spec"

FAMILY = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    read=_read,
    layer=hybrid_layer,
    reads=READS | words("norm_topk_prob decoder_sparse_step mlp_only_layers"),
    fixed={"attention_bias": False},
    engine_takes=UNTIED,
    stacked=STACKED_EXPERTS,
    carried=("mtp.",),
    # vLLM makes every fourth layer one of attention where layer_types does not say
    engine=ENGINE | {"full_attention_interval": (4,), "mlp_layer_types": (None,)},
    spec=SPEC,
)
