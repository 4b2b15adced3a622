"""Qwen2 and Qwen2.5 (DeepSeek-R1-Distill-Qwen-1.5B)."""

from megatron_dppo.models.family import Family
from megatron_dppo.models.names import ATTENTION, DENSE_MLP, EMBEDDINGS, QKV_BIAS

FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    table={**EMBEDDINGS, **ATTENTION, **QKV_BIAS, **DENSE_MLP},
    qkv_bias=True,
)
