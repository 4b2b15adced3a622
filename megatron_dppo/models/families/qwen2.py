"""Qwen2 and Qwen2.5 (DeepSeek-R1-Distill-Qwen-1.5B)."""

from megatron_dppo.models.families.decoder import decoder
from megatron_dppo.models.families.tables import ATTENTION, DENSE_MLP, QKV_BIAS
from megatron_dppo.models.family import Family

FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    read=lambda config: decoder(config, qkv_bias=True),
    layer=lambda model, layer: {**ATTENTION, **QKV_BIAS, **DENSE_MLP},
    engine={"qk_norm": (None, False)},
    engine_divides_heads=True,
)
