"""What families share: the fields of a usual config.json, and Megatron-Core's fields of it."""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from transformers import PreTrainedConfig

from megatron_dppo.errors import UserError
from megatron_dppo.models.architecture import Architecture, DeltaRule, Latent, MoE


def words(text: str) -> frozenset[str]:
    """Names of fields, separated by spaces."""
    return frozenset(text.split())


READS = words(
    """
        hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size vocab_size
        tie_word_embeddings rms_norm_eps max_position_embeddings rope_theta rope_scaling rope_parameters
        partial_rotary_factor original_max_position_embeddings use_sliding_window sliding_window max_window_layers
        layer_types
    """
)
FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "is_encoder_decoder": False,
    "is_causal": True,
}
UNTIED = {"tie_word_embeddings": False}
"""For `Family.engine_takes`: vLLM's model has an output layer of its own, and leaves it as it is without weights."""
LARGEST = {"num_hidden_layers": 2**10, "vocab_size": 2**26, "max_position_embeddings": 2**40}
LARGEST |= dict.fromkeys(words("hidden_size q_lora_rank kv_lora_rank"), 2**20)
LARGEST |= dict.fromkeys(words("intermediate_size moe_intermediate_size shared_expert_intermediate_size"), 2**24)
LARGEST |= dict.fromkeys(words("num_attention_heads num_key_value_heads num_experts num_local_experts"), 2**14)
LARGEST |= dict.fromkeys(words("n_routed_experts linear_num_key_heads linear_num_value_heads"), 2**14)
LARGEST |= dict.fromkeys(words("head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim linear_key_head_dim"), 2**14)
LARGEST |= dict.fromkeys(words("linear_value_head_dim linear_conv_kernel_dim"), 2**14)
"""Config fields of all families with the largest size that any model has."""


def whole(config: PreTrainedConfig, name: str) -> int:
    """A size; `UserError` where it is none."""
    value = getattr(config, name, None)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{name} is {value!r}, it must be a whole number above 0")
    return value


def further_layers(config: PreTrainedConfig, name: str) -> int:
    """How many layers a checkpoint may hold after the last."""
    count = getattr(config, name, None) or 0
    if count > 2**10:
        raise UserError(f"{name} is {count:,}, more layers than any model has")
    return int(count)


def mixture(
    config: PreTrainedConfig,
    *,
    experts: str = "num_experts",
    size: str = "moe_intermediate_size",
    normalise: bool = True,
    layers: tuple[bool, ...] | None = None,
    **others: Any,
) -> MoE:
    """Of fields that hold the number of experts and an expert's `size`; `others` of `MoE`. Default: in all layers."""
    available, chosen = whole(config, experts), whole(config, "num_experts_per_tok")
    if chosen > available:
        raise UserError(f"num_experts_per_tok is {chosen}, with {available} experts")
    return MoE(
        experts=available,
        topk=chosen,
        intermediate_size=whole(config, size),
        normalise=normalise,
        layers=layers or (True,) * whole(config, "num_hidden_layers"),
        **others,
    )


def number(config: PreTrainedConfig, name: str) -> float:
    """A factor; `UserError` where it is none."""
    value = getattr(config, name, None)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UserError(f"{name} is {value!r}, it must be a number above 0")
    return float(value)


def check_sigmoid(topk: int, *, normalise: bool, groups: int = 1, group_topk: int = 1, experts: int = 0) -> None:
    """`UserError` for what Megatron-Core's router does in another way than transformers and vLLM where scores are
    sigmoids: it divides the weights by their sum whenever there are several, and ranks groups of experts by the sum of
    their best `topk // group_topk` scores, not of the best two."""
    if normalise != (topk > 1):
        raise UserError(
            f"norm_topk_prob is {normalise} with num_experts_per_tok {topk}; with sigmoid scores only several experts "
            "whose weights are divided by their sum, or one whose weight is not, are supported"
        )
    if group_topk > groups:
        raise UserError(f"topk_group is {group_topk}, of n_group {groups}")
    if groups == 1:
        return
    if experts % groups or experts // groups < 2 or group_topk * (experts // groups) < topk:
        raise UserError(
            f"n_group {groups} and topk_group {group_topk} do not fit: {topk} of {experts} experts are to be chosen "
            f"from {group_topk} groups of equal size"
        )
    if topk // group_topk != 2 and group_topk != groups:
        raise UserError(
            f"topk_group is {group_topk} of n_group {groups} with num_experts_per_tok {topk}; the groups' choice is "
            "supported where num_experts_per_tok // topk_group is 2"
        )


def sigmoid_moe(config: PreTrainedConfig, dense: Any) -> MoE:
    """Experts by sigmoid scores and correction bias, `n_group` groups of them, shared ones beside; the first `dense`
    layers have none."""
    layers = whole(config, "num_hidden_layers")
    if isinstance(dense, bool) or not isinstance(dense, int) or not 0 <= dense < layers:
        raise UserError(f"first_k_dense_replace is {dense!r}; of {layers} layers at least one must have experts")
    groups, chosen = whole(config, "n_group"), whole(config, "topk_group")
    moe = mixture(
        config,
        experts="n_routed_experts",
        normalise=bool(config.norm_topk_prob),
        layers=tuple(layer >= dense for layer in range(layers)),
        score="sigmoid",
        bias=True,
        scaling=number(config, "routed_scaling_factor"),
        groups=1 if chosen == groups else groups,  # from all groups is without a limit
        group_topk=1 if chosen == groups else chosen,
        shared_size=whole(config, "moe_intermediate_size") * whole(config, "n_shared_experts"),
    )
    check_sigmoid(moe.topk, normalise=moe.normalise, groups=groups, group_topk=chosen, experts=moe.experts)
    return moe


def latent(config: PreTrainedConfig) -> Latent:
    """Of a config.json with `kv_lora_rank`."""
    rope = dict(config.rope_parameters or {})
    kind, factor, mscale = rope.get("rope_type", "default"), rope.get("factor"), rope.get("mscale_all_dim") or 0.0
    if kind not in ("default", "yarn"):
        raise UserError(f"rope_type {kind!r} is not supported with latent attention; there are default and yarn")
    if isinstance(mscale, bool) or not isinstance(mscale, int | float) or not 0 <= mscale < math.inf:
        raise UserError(f"rope_parameters.mscale_all_dim is {mscale!r}, it must be a number from 0 on")
    if (pairs := whole(config, "qk_rope_head_dim")) % 2:
        raise UserError(f"qk_rope_head_dim is {pairs}; pairs are rotated: it must be an even number")
    plain = whole(config, "qk_nope_head_dim")
    for name, value in (("head_dim", pairs), ("qk_head_dim", plain + pairs)):
        if (said := getattr(config, name)) != value:
            raise UserError(
                f"{name} is {said!r}; with qk_nope_head_dim {plain} and qk_rope_head_dim {pairs} it is {value}"
            )
    if config.num_key_value_heads != config.num_attention_heads:
        raise UserError(
            f"num_key_value_heads is {config.num_key_value_heads!r} with num_attention_heads "
            f"{config.num_attention_heads!r}; latent attention has as many of both"
        )
    return Latent(
        query_rank=None if config.q_lora_rank is None else whole(config, "q_lora_rank"),
        rank=whole(config, "kv_lora_rank"),
        plain_dim=plain,
        rotary_dim=pairs,
        value_dim=whole(config, "v_head_dim"),
        yarn_factor=float(factor) if kind == "yarn" and isinstance(factor, int | float) else 1.0,
        mscale_all_dim=float(mscale) if kind == "yarn" else 0.0,
    )


def decoder(
    config: PreTrainedConfig,
    *,
    partial_rotary: bool = False,
    windows: tuple[int | None, ...] = (),
    delta: DeltaRule | None = None,
    latent: Latent | None = None,
    moe: MoE | None = None,
    **others: Any,
) -> Architecture:
    """The architecture of a usual config.json: sizes that are some, and no sliding window but `windows`; `others` of
    `Architecture`. `partial_rotary`: the model type knows `partial_rotary_factor`."""
    heads, kv_heads = whole(config, "num_attention_heads"), whole(config, "num_key_value_heads")
    head_dim, eps, mlp = getattr(config, "head_dim", None), config.rms_norm_eps, "intermediate_size"
    width = whole(config, mlp) if hasattr(config, mlp) or not moe else moe.intermediate_size
    if latent:
        head_dim = latent.plain_dim + latent.rotary_dim
    if head_dim is not None and (isinstance(head_dim, bool) or not isinstance(head_dim, int) or head_dim < 2):
        raise UserError(f"head_dim is {head_dim!r}, it must be a whole number above 1")
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 <= eps < math.inf:
        raise UserError(f"rms_norm_eps is {eps!r}, it must be a number from 0 on")
    if heads % kv_heads:
        raise UserError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if not windows:
        _no_window(config, {"full_attention"} | ({"linear_attention"} if delta else set()))
    head_dim = head_dim or config.hidden_size // heads
    return Architecture(
        layers=whole(config, "num_hidden_layers"),
        hidden_size=whole(config, "hidden_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=width,
        vocab_size=whole(config, "vocab_size"),
        tied=bool(config.tie_word_embeddings),
        rms_norm_eps=eps,
        max_position_embeddings=whole(config, "max_position_embeddings"),
        rotary_factor=_rotary_factor(config, head_dim) if partial_rotary else 1.0,
        windows=windows,
        delta=delta,
        latent=latent,
        moe=moe,
        **others,
    )


def _rotary_factor(config: PreTrainedConfig, head_dim: int) -> float:
    factor = (config.rope_parameters or {}).get("partial_rotary_factor", 1.0)
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor <= 1:
        raise UserError(f"partial_rotary_factor is {factor!r}, it must be a number above 0 and at most 1")
    if (rotated := int(head_dim * factor)) < 2 or rotated % 2:
        raise UserError(
            f"partial_rotary_factor {factor} of head_dim {head_dim} are {rotated} dimensions; pairs are rotated: it "
            "must be an even number of them"
        )
    return float(factor)


def _no_window(config: PreTrainedConfig, known: set[str]) -> None:
    others = sorted(set(getattr(config, "layer_types", None) or []) - known)
    window = getattr(config, "sliding_window", None)
    if others:
        cause = "use_sliding_window is true and so " if window else ""
        raise UserError(f"{cause}layer_types has {others}, only {', '.join(sorted(known))} is supported")
    if not getattr(config, "layer_types", None) and window is not None:
        flag = "use_sliding_window is true" if getattr(config, "use_sliding_window", False) else "sliding_window is set"
        raise UserError(
            f"{flag}: attention would reach back {window} tokens only; sliding-window attention is not supported"
        )


def megatron_fields(model: Architecture) -> dict[str, Any]:
    """`TransformerConfig`'s fields of an `Architecture`."""
    fields: dict[str, Any] = {
        "num_layers": model.layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.intermediate_size,
        "num_attention_heads": model.heads,
        "num_query_groups": model.kv_heads,
        "kv_channels": model.head_dim,
        "qk_layernorm": model.qk_norm != "none",
        "add_bias_linear": False,
        "add_qkv_bias": model.qkv_bias,
        "normalization": "RMSNorm",
        "layernorm_epsilon": model.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "attention_output_gate": model.output_gate,
        "layernorm_zero_centered_gamma": model.centred_norms,
        "softmax_type": "learnable" if model.sinks else "vanilla",
    }
    if model.delta:
        fields |= {
            "linear_conv_kernel_dim": model.delta.convolution,
            "linear_key_head_dim": model.delta.key_dim,
            "linear_value_head_dim": model.delta.value_dim,
            "linear_num_key_heads": model.delta.key_heads,
            "linear_num_value_heads": model.delta.value_heads,
        }
    if model.latent:
        fields |= {
            "q_lora_rank": model.latent.query_rank,
            "kv_lora_rank": model.latent.rank,
            "qk_head_dim": model.latent.plain_dim,
            "qk_pos_emb_head_dim": model.latent.rotary_dim,
            "v_head_dim": model.latent.value_dim,
            # The scale of the softmax; the rotation is `models.rope`'s
            "rope_type": "yarn",
            "rotary_scaling_factor": model.latent.yarn_factor,
            "mscale_all_dim": model.latent.mscale_all_dim,
        }
    if sizes := {window for window in model.windows if window is not None}:
        if len(sizes) > 1:
            raise UserError(f"layers have windows of {sorted(sizes)} tokens; one size is supported")
        fields |= {
            "window_size": (sizes.pop() - 1, 0),  # Megatron-Core does not count the token itself
            "window_attn_skip_freq": [int(window is not None) for window in model.windows],
        }
    if model.moe:
        fields |= {
            "num_moe_experts": model.moe.experts,
            "moe_ffn_hidden_size": model.moe.intermediate_size,
            "moe_layer_freq": [int(is_moe) for is_moe in model.moe.layers],
            "moe_router_topk": model.moe.topk,
            # Renormalised top-k probabilities are the softmax of the top-k logits alone.
            "moe_router_pre_softmax": not model.moe.normalise,
            "moe_router_score_function": model.moe.score,
            "moe_router_enable_expert_bias": model.moe.bias,
            "moe_router_topk_scaling_factor": None if model.moe.scaling == 1.0 else model.moe.scaling,
            "moe_shared_expert_intermediate_size": model.moe.shared_size or None,
            "moe_shared_expert_gate": model.moe.shared_gate,
        }
        if model.moe.groups > 1:
            fields |= {"moe_router_num_groups": model.moe.groups, "moe_router_group_topk": model.moe.group_topk}
    return fields
