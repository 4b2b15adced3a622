"""MiniMax-M2, M2.1 and M2.5: sigmoid scores with a correction bias; queries and keys pass one RMSNorm over all heads of
their projection, and half of each head is rotated."""

from transformers import PreTrainedConfig

from megatron_dppo.errors import UserError
from megatron_dppo.models.architecture import Architecture
from megatron_dppo.models.families.decoder import UNTIED, check_sigmoid, decoder, further_layers, mixture, words
from megatron_dppo.models.families.tables import ATTENTION, STACKED_EXPERTS, correction_bias, experts, qk_norm
from megatron_dppo.models.family import Family

_BIAS = "block_sparse_moe.e_score_correction_bias"
_PARAMETER, _TENSOR = "decoder.layers.{layer}.mlp.router.", "model.layers.{layer}.mlp."


def _amend(config: PreTrainedConfig) -> None:
    """Published files say `rotary_dim`, which transformers 5.17 does not read: it would rotate whole heads, and vLLM
    does not (corrected in later versions, huggingface/transformers#48486)."""
    if hasattr(config, "rotary_dim") and isinstance(config.rope_parameters, dict):
        config.rope_parameters.setdefault("partial_rotary_factor", config.rotary_dim / config.head_dim)


def _read(config: PreTrainedConfig) -> Architecture:
    for name, value in (("scoring_func", "sigmoid"), ("use_routing_bias", True)):
        if (said := getattr(config, name, None)) != value:
            raise UserError(f"{name} is {said!r}; vLLM goes by it, and this model type has {value!r}: set it")
    rotated = getattr(config, "rotary_dim", config.head_dim)
    if rotated % 2 or rotated > config.head_dim:
        raise UserError(f"rotary_dim is {rotated}; it must be even, and at most head_dim {config.head_dim}")
    moe = mixture(config, experts="num_local_experts", size="intermediate_size", score="sigmoid", bias=True)
    check_sigmoid(moe.topk, normalise=True)
    further = further_layers(config, "num_mtp_modules")
    return decoder(config, qk_norm="projection", partial_rotary=True, mtp_layers=further, moe=moe)


FAMILY = Family(
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    read=_read,
    amend=_amend,
    layer=lambda model, layer: {
        **ATTENTION,
        **qk_norm("query", "key"),
        **experts("block_sparse_moe", "w1", "w3", "w2"),
        **correction_bias(_BIAS),
    },
    reads=words(
        """
            num_experts num_local_experts num_experts_per_tok scoring_func use_routing_bias rotary_dim num_mtp_modules
        """
    ),
    fixed={"router_jitter_noise": 0.0},
    engine={"attention_bias": (None, False)},
    engine_takes=UNTIED,
    stacked=STACKED_EXPERTS
    | {f"{_PARAMETER}weight": f"{_TENSOR}gate.weight", f"{_PARAMETER}expert_bias": f"{_TENSOR}e_score_correction_bias"},
    spec="megatron_dppo.models.layers.projection_norm:spec",
)
