"""What the numbers of a config.json must be. transformers computes with some of them before it looks at them, and takes
others as they are; a file comes from anybody."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from megatron_dppo.errors import UserError
from megatron_dppo.models.families.decoder import words

_SIZE, _COUNT, _WHOLE = "a whole number above 0", "a whole number from 0 on", "a whole number"
_FACTOR, _NUMBER, _FLAG = "a number above 0", "a number from 0 on", "true or false"

_KINDS: dict[str, frozenset[str]] = {
    _SIZE: words(
        """
            hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size vocab_size
            max_position_embeddings original_max_position_embeddings num_experts_per_tok num_local_experts
            n_routed_experts n_shared_experts n_group topk_group moe_intermediate_size decoder_sparse_step
            shared_expert_intermediate_size q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim
            v_head_dim full_attention_interval rotary_dim linear_num_key_heads linear_num_value_heads
            linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim
        """
    ),
    _COUNT: words("num_experts first_k_dense_replace num_nextn_predict_layers num_mtp_layers num_mtp_modules"),
    _WHOLE: words("sliding_window max_window_layers"),  # which may be in a file without effect
    _FACTOR: words("rope_theta partial_rotary_factor routed_scaling_factor swiglu_limit"),
    _NUMBER: words("rms_norm_eps initializer_range attention_dropout router_jitter_noise"),
    _FLAG: words(
        """
            tie_word_embeddings use_sliding_window norm_topk_prob attention_bias mlp_bias use_qk_norm use_routing_bias
            rope_interleave is_causal is_encoder_decoder
        """
    ),
}
_KINDS_OF_ROPE: dict[str, frozenset[str]] = {
    _SIZE: words("original_max_position_embeddings"),
    _FACTOR: words(
        """
            rope_theta partial_rotary_factor factor beta_fast beta_slow low_freq_factor high_freq_factor attn_factor
            attention_factor extrapolation_factor
        """
    ),
    _NUMBER: words("mscale mscale_all_dim"),
    _FLAG: words("truncate apply_yarn_scaling mrope_interleaved"),
}
_NEVER_NULL = words("full_attention_interval rotary_dim")
"""Of the others null is transformers' default, or refused where it is used."""
_NULL_OF_ROPE = words("attention_factor partial_rotary_factor")


def refuse_kinds(raw: Mapping[str, Any], read: Container[str], where: str) -> None:
    """Raise `UserError` for the first field of `read`, or of the rotary settings, that is no number where one must be
    (text, true, a list, infinity), or none of its kind."""
    for name, value in raw.items():
        if name in read and (value is not None or name in _NEVER_NULL):
            _refuse(name, name, value, _KINDS, where)
    for spelling in ("rope_scaling", "rope_parameters"):
        rope = raw.get(spelling)
        if rope is not None and not isinstance(rope, dict):
            raise UserError(f"{where}: {spelling} is {rope!r:.80}, it must be an object or null")
        for name, value in (rope or {}).items():
            if value is not None or name not in _NULL_OF_ROPE:
                _refuse(name, f"{spelling}.{name}", value, _KINDS_OF_ROPE, where)


def _refuse(name: str, shown: str, value: Any, kinds: Mapping[str, Container[str]], where: str) -> None:
    kind = next((kind for kind, names in kinds.items() if name in names), None)
    if kind is not None and not _is(value, kind):
        raise UserError(f"{where}: {shown} is {value!r:.80}, it must be {kind}")


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool) or kind == _FLAG:
        return isinstance(value, bool) and kind == _FLAG
    of, largest = (int, 2**53) if kind in (_SIZE, _COUNT, _WHOLE) else (int | float, 1e300)
    if not isinstance(value, of) or not abs(value) <= largest:  # false for nan; no model has such sizes
        return False
    return kind == _WHOLE or value > 0 or (value == 0 and kind in (_COUNT, _NUMBER))
