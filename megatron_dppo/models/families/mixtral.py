"""Mixtral (8x7B, 8x22B)."""

from transformers import PreTrainedConfig

from megatron_dppo.models.architecture import Architecture, MoE
from megatron_dppo.models.families.decoder import decoder, topk, whole, words
from megatron_dppo.models.families.tables import ATTENTION, STACKED_EXPERTS, experts
from megatron_dppo.models.family import Family


def _read(config: PreTrainedConfig) -> Architecture:
    number = whole(config, "num_local_experts")
    moe = MoE(
        experts=number,
        topk=topk(config, number),
        intermediate_size=whole(config, "intermediate_size"),
        normalise=True,
        layers=(True,) * whole(config, "num_hidden_layers"),
    )
    return decoder(config, moe=moe)


FAMILY = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    read=_read,
    layer=lambda model, layer: {**ATTENTION, **experts("block_sparse_moe", "w1", "w3", "w2")},
    reads=words("num_experts num_local_experts num_experts_per_tok"),
    fixed={"router_jitter_noise": 0.0},
    stacked=STACKED_EXPERTS | {"decoder.layers.{layer}.mlp.router.weight": "model.layers.{layer}.mlp.gate.weight"},
)
