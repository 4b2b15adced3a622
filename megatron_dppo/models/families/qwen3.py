"""Qwen3, dense (Qwen3-8B)."""

from megatron_dppo.models.family import Family
from megatron_dppo.models.names import ATTENTION, DENSE_MLP, EMBEDDINGS, QK_NORM

FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    table={**EMBEDDINGS, **ATTENTION, **QK_NORM, **DENSE_MLP},
    qk_norm=True,
    fixed={"attention_bias": False},
)
