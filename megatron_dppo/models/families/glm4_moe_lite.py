"""GLM-4.7-Flash: the attention of DeepSeek-V3 and the layers of GLM-4.5."""

from transformers import PreTrainedConfig

from megatron_dppo.errors import UserError
from megatron_dppo.models.architecture import Architecture
from megatron_dppo.models.families import deepseek_v3
from megatron_dppo.models.families.decoder import UNTIED, decoder, further_layers, latent, sigmoid_moe, words
from megatron_dppo.models.families.tables import STACKED_EXPERTS
from megatron_dppo.models.family import Family


def _read(config: PreTrainedConfig) -> Architecture:
    dense, kinds = getattr(config, "first_k_dense_replace", None), list(config.mlp_layer_types)
    moe = sigmoid_moe(config, dense)
    if kinds != ["sparse" if sparse else "dense" for sparse in moe.layers]:
        raise UserError(
            f"first_k_dense_replace is {dense}, by which vLLM goes, and mlp_layer_types, by which transformers goes, "
            f"has {kinds.count('dense')} dense layers; only so many at the beginning are supported"
        )
    further = further_layers(config, "num_nextn_predict_layers")
    return decoder(config, mtp_layers=further, latent=latent(config), moe=moe)


FAMILY = Family(
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    read=_read,
    layer=deepseek_v3.layer,
    reads=deepseek_v3.READS - words("scoring_func topk_method") | words("mlp_layer_types"),
    fixed=deepseek_v3.FIXED,
    engine=deepseek_v3.ENGINE,
    engine_takes=UNTIED,
    engine_scales_by_mscale=True,
    stacked=STACKED_EXPERTS,
    spec=deepseek_v3.SPEC,
)
