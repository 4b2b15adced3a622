"""Qwen3-MoE (Qwen3-30B-A3B, Qwen3-235B-A22B)."""

from transformers import PreTrainedConfig

from megatron_dppo.errors import UserError
from megatron_dppo.models.architecture import Architecture, MoE
from megatron_dppo.models.families.decoder import decoder, mixture, whole, words
from megatron_dppo.models.families.tables import ATTENTION, DENSE_MLP, STACKED_EXPERTS, experts, qk_norm
from megatron_dppo.models.family import Family
from megatron_dppo.models.names import Table


def _read(config: PreTrainedConfig) -> Architecture:
    if getattr(config, "head_dim", 0) is None:
        raise UserError("head_dim is null, with which transformers has no model; set it to what the weights have")
    return decoder(config, qk_norm="head", moe=_moe(config))


def _moe(config: PreTrainedConfig) -> MoE | None:
    if not config.num_experts:
        return None
    dense, step = set(config.mlp_only_layers or []), whole(config, "decoder_sparse_step")
    layers = tuple(i not in dense and (i + 1) % step == 0 for i in range(whole(config, "num_hidden_layers")))
    if not any(layers):
        raise UserError("decoder_sparse_step and mlp_only_layers leave no expert layer; set num_experts to 0")
    return mixture(config, normalise=bool(config.norm_topk_prob), layers=layers)


def _layer(model: Architecture, layer: int) -> Table:
    return {**ATTENTION, **qk_norm(), **(experts() if model.is_moe_layer(layer) else DENSE_MLP)}


FAMILY = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    read=_read,
    layer=_layer,
    reads=words(
        """
            num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob decoder_sparse_step
            mlp_only_layers
        """
    ),
    fixed={"attention_bias": False},
    stacked=STACKED_EXPERTS,
    engine={"shared_expert_intermediate_size": (0,)},
)
