"""Llama 2, 3.x (OctoThinker-3B)."""

from megatron_dppo.models.family import Family
from megatron_dppo.models.names import ATTENTION, DENSE_MLP, EMBEDDINGS

FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    table={**EMBEDDINGS, **ATTENTION, **DENSE_MLP},
    fixed={"attention_bias": False, "mlp_bias": False},
)
