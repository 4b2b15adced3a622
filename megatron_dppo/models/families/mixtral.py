"""Mixtral (8x7B, 8x22B)."""

from transformers import PreTrainedConfig

from megatron_dppo.models.architecture import Architecture
from megatron_dppo.models.families.decoder import decoder, mixture, words
from megatron_dppo.models.families.tables import ATTENTION, STACKED_EXPERTS, experts
from megatron_dppo.models.family import Family


def _read(config: PreTrainedConfig) -> Architecture:
    return decoder(config, moe=mixture(config, experts="num_local_experts", size="intermediate_size"))


FAMILY = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    read=_read,
    layer=lambda model, layer: {**ATTENTION, **experts("block_sparse_moe", "w1", "w3", "w2")},
    reads=words("num_experts num_local_experts num_experts_per_tok"),
    fixed={"router_jitter_noise": 0.0},
    stacked=STACKED_EXPERTS | {"decoder.layers.{layer}.mlp.router.weight": "model.layers.{layer}.mlp.gate.weight"},
)
