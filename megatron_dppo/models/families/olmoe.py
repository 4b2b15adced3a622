"""OLMoE (OLMoE-1B-7B): queries and keys pass one RMSNorm over all heads of their projection."""

from transformers import PreTrainedConfig

from megatron_dppo.models.architecture import Architecture
from megatron_dppo.models.families.decoder import UNTIED, decoder, mixture, words
from megatron_dppo.models.families.tables import ATTENTION, STACKED_EXPERTS, experts, qk_norm
from megatron_dppo.models.family import Family


def _read(config: PreTrainedConfig) -> Architecture:
    moe = mixture(config, size="intermediate_size", normalise=bool(config.norm_topk_prob))
    return decoder(config, qk_norm="projection", moe=moe)


FAMILY = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    read=_read,
    layer=lambda model, layer: {**ATTENTION, **qk_norm("query", "key"), **experts()},
    reads=words("num_experts num_local_experts num_experts_per_tok norm_topk_prob"),
    # vLLM's q_norm and k_norm have this epsilon, whatever the config says
    fixed={"attention_bias": False, "clip_qkv": None, "rms_norm_eps": 1e-5},
    engine_takes=UNTIED | {"norm_topk_prob": False},
    engine_divides_heads=True,
    stacked=STACKED_EXPERTS,
    spec="megatron_dppo.models.layers.projection_norm:spec",
)
