"""Qwen3-MoE (Qwen3-30B-A3B, Qwen3-235B-A22B)."""

from megatron_dppo.models.family import Family
from megatron_dppo.models.names import ATTENTION, DENSE_MLP, EMBEDDINGS, EXPERTS, QK_NORM

FAMILY = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    table={**EMBEDDINGS, **ATTENTION, **QK_NORM, **DENSE_MLP, **EXPERTS},
    qk_norm=True,
    moe=True,
    fixed={"attention_bias": False},
)
