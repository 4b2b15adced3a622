"""Qwen3.5 (0.8B to 27B): Qwen3-Next's layers with a dense MLP, in a model that sees images too, whose text part is
trained."""

from typing import Any

from transformers import PreTrainedConfig

from megatron_dppo.models.architecture import Architecture
from megatron_dppo.models.families.decoder import whole
from megatron_dppo.models.families.qwen3_next import DENSE_READS, ENGINE, SPEC, hybrid, hybrid_layer
from megatron_dppo.models.families.tables import ENDS
from megatron_dppo.models.family import Family
from megatron_dppo.models.names import Below, Sections, Table, moved

HERE = "model.", "model.language_model."
_IN_PROJ, _DELTA = "decoder.layers.{layer}.self_attention.in_proj.weight", "model.layers.{layer}.linear_attn"
_SEPARATE = Below(
    (
        Sections(f"{_DELTA}.in_proj_qkv.weight", ("delta_key", "delta_key", "delta_value"), ("hidden",)),
        Sections(f"{_DELTA}.in_proj_z.weight", ("delta_value",), ("hidden",)),
        Sections(f"{_DELTA}.in_proj_b.weight", ("delta_heads",), ("hidden",)),
        Sections(f"{_DELTA}.in_proj_a.weight", ("delta_heads",), ("hidden",)),
    )
)


def _read(config: PreTrainedConfig) -> Architecture:
    return hybrid(config, (False,) * whole(config, "num_hidden_layers"))


def _layer(model: Architecture, layer: int) -> Table:
    separate = {_IN_PROJ: _SEPARATE} if model.is_delta_layer(layer) else {}
    return moved({**hybrid_layer(model, layer), **separate}, *HERE)


COMMON: dict[str, Any] = {
    "layer": _layer,
    "ends": moved(ENDS, *HERE),
    "fixed": {"attention_bias": False},
    "carried": ("model.visual.", "mtp."),
    "engine": ENGINE
    | {"norm_topk_prob": (True,), "output_gate_type": ("silu", "swish")}
    | {"decoder_sparse_step": (1,), "mlp_only_layers": ([],)},
    "image_positions": True,
    "spec": SPEC,
}
FAMILY = Family(
    model_type="qwen3_5",
    text_type="qwen3_5_text",
    architecture="Qwen3_5ForConditionalGeneration",
    read=_read,
    reads=DENSE_READS,
    **COMMON,
)
