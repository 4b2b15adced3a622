"""gpt-oss (20b, 120b): attention sinks, windows in every other layer, biases everywhere, a clamped SwiGLU."""

from typing import Any

from transformers import PreTrainedConfig

from megatron_dppo.errors import UserError
from megatron_dppo.models.architecture import Architecture
from megatron_dppo.models.families.decoder import UNTIED, decoder, megatron_fields, mixture, whole, words
from megatron_dppo.models.families.tables import ATTENTION, QKV_BIAS
from megatron_dppo.models.family import Family
from megatron_dppo.models.names import Sections, Table, Whole
from megatron_dppo.models.stacked import OfAll

_L, _H = "decoder.layers.{layer}", "model.layers.{layer}"
_EXPERT, _EXPERTS = f"{_L}.mlp.experts.{{expert}}", f"{_H}.mlp.experts"
_ROTATION = words("rope_type rope_theta factor beta_fast beta_slow truncate original_max_position_embeddings")
"""What vLLM's model reads of `rope_parameters`, each without a default but `truncate`."""

_LAYER: Table = {
    **ATTENTION,
    **QKV_BIAS,
    f"{_L}.self_attention.linear_proj.bias": Whole(f"{_H}.self_attn.o_proj.bias"),
    f"{_L}.self_attention.core_attention.softmax_offset": Sections(f"{_H}.self_attn.sinks", ("heads",)),
    f"{_L}.mlp.router.weight": Whole(f"{_H}.mlp.router.weight", ("experts", "hidden")),
    f"{_L}.mlp.router.bias": Whole(f"{_H}.mlp.router.bias", ("experts",)),
    f"{_EXPERT}.linear_fc1.weight": OfAll(f"{_EXPERTS}.gate_up_proj", pairs=True),
    f"{_EXPERT}.linear_fc1.bias": OfAll(f"{_EXPERTS}.gate_up_proj_bias", inputs=None, pairs=True),
    f"{_EXPERT}.linear_fc2.weight": OfAll(f"{_EXPERTS}.down_proj", "hidden", "moe_ffn"),
    f"{_EXPERT}.linear_fc2.bias": OfAll(f"{_EXPERTS}.down_proj_bias", "hidden", None),
}


def _read(config: PreTrainedConfig) -> Architecture:
    layers, window = whole(config, "num_hidden_layers"), whole(config, "sliding_window")
    kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]
    if list(config.layer_types) != kinds:
        raise UserError(f"layer_types is {config.layer_types}; vLLM goes by sliding, full, sliding, full, ... alone")
    rope = dict(config.rope_parameters or {})
    if rope.get("rope_type") != "yarn" or set(rope) | {"truncate"} != _ROTATION:
        raise UserError(f"rope_parameters is {rope}; vLLM's model takes yarn with {', '.join(sorted(_ROTATION))} alone")
    moe = mixture(config, experts="num_local_experts", size="intermediate_size", linear_bias=True)
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return decoder(config, qkv_bias=True, windows=windows, sinks=True, moe=moe)


def _megatron(model: Architecture) -> dict[str, Any]:
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    return megatron_fields(model) | {
        "add_bias_linear": True,
        # (up + 1) * gate * sigmoid(1.702 gate), gate at most 7, up from -7 to 7
        "activation_func": quick_gelu,
        "activation_func_clamp_value": 7.0,
        "glu_linear_offset": 1.0,
    }


FAMILY = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    read=_read,
    layer=lambda model, layer: _LAYER,
    reads=words("num_experts num_local_experts num_experts_per_tok"),
    fixed={"attention_bias": True, "swiglu_limit": 7.0, "rms_norm_eps": 1e-5},
    megatron=_megatron,
    engine_takes=UNTIED,
    spec="megatron_dppo.models.layers.sink_attention:spec",
)
