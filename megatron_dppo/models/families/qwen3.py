"""Qwen3, dense (Qwen3-8B)."""

from megatron_dppo.models.families.decoder import decoder
from megatron_dppo.models.families.tables import ATTENTION, DENSE_MLP, qk_norm
from megatron_dppo.models.family import Family

FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    read=lambda config: decoder(config, qk_norm="head"),
    layer=lambda model, layer: {**ATTENTION, **qk_norm(), **DENSE_MLP},
    fixed={"attention_bias": False},
)
