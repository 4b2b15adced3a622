"""Llama 2, 3.x (OctoThinker-3B)."""

from megatron_dppo.models.families.decoder import decoder
from megatron_dppo.models.families.tables import ATTENTION, DENSE_MLP
from megatron_dppo.models.family import Family

FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    read=decoder,
    layer=lambda model, layer: {**ATTENTION, **DENSE_MLP},
    fixed={"attention_bias": False, "mlp_bias": False},
    engine={"bias": (None, False), "qkv_bias": (None, False), "logit_scale": (1.0,)},
)
