"""What families share: which Megatron-Core parameters are made of which tensors of a usual checkpoint."""

from __future__ import annotations

from megatron_dppo.models.architecture import Architecture
from megatron_dppo.models.names import (
    QKV,
    Buffer,
    ByKeyHead,
    Columns,
    Sections,
    Table,
    Vocabulary,
    Whole,
    gate_up,
)

_L, _H = "decoder.layers.{layer}", "model.layers.{layer}"

ENDS: Table = {
    "embedding.word_embeddings.weight": Vocabulary("model.embed_tokens.weight"),
    "decoder.final_layernorm.weight": Whole("model.norm.weight"),
    "output_layer.weight": Vocabulary("lm_head.weight"),
}
ATTENTION: Table = {
    f"{_L}.input_layernorm.weight": Whole(f"{_H}.input_layernorm.weight"),
    f"{_L}.self_attention.linear_qkv.weight": QKV(
        f"{_H}.self_attn.q_proj.weight", f"{_H}.self_attn.k_proj.weight", f"{_H}.self_attn.v_proj.weight"
    ),
    f"{_L}.self_attention.linear_proj.weight": Columns(f"{_H}.self_attn.o_proj.weight", cols="query"),
    f"{_L}.pre_mlp_layernorm.weight": Whole(f"{_H}.post_attention_layernorm.weight"),
}
QKV_BIAS: Table = {
    f"{_L}.self_attention.linear_qkv.bias": QKV(
        f"{_H}.self_attn.q_proj.bias", f"{_H}.self_attn.k_proj.bias", f"{_H}.self_attn.v_proj.bias", cols=None
    ),
}
DENSE_MLP: Table = {
    f"{_L}.mlp.linear_fc1.weight": gate_up(f"{_H}.mlp.gate_proj.weight", f"{_H}.mlp.up_proj.weight"),
    f"{_L}.mlp.linear_fc2.weight": Columns(f"{_H}.mlp.down_proj.weight", cols="ffn"),
}
DELTA_RULE: Table = {
    f"{_L}.input_layernorm.weight": Whole(f"{_H}.input_layernorm.weight"),
    f"{_L}.self_attention.in_proj.weight": ByKeyHead(
        f"{_H}.linear_attn.in_proj_qkvz.weight", f"{_H}.linear_attn.in_proj_ba.weight"
    ),
    f"{_L}.self_attention.conv1d.weight": Sections(
        f"{_H}.linear_attn.conv1d.weight", ("delta_key", "delta_key", "delta_value"), ("one", "convolution")
    ),
    f"{_L}.self_attention.dt_bias": Sections(f"{_H}.linear_attn.dt_bias", ("delta_heads",)),
    f"{_L}.self_attention.A_log": Sections(f"{_H}.linear_attn.A_log", ("delta_heads",)),
    f"{_L}.self_attention.out_norm.weight": Whole(f"{_H}.linear_attn.norm.weight", ("delta_head_dim",)),
    f"{_L}.self_attention.out_proj.weight": Columns(f"{_H}.linear_attn.out_proj.weight", cols="delta_value"),
    f"{_L}.pre_mlp_layernorm.weight": Whole(f"{_H}.post_attention_layernorm.weight"),
}
"""Of a layer that has it in place of attention."""


def shared_expert(block: str = "shared_experts", gate: str = "") -> Table:
    """The MLP that every token passes, by the name that it has, and its gate where there is one."""
    here, there = f"{_L}.mlp.shared_experts", f"{_H}.mlp.{block}"
    table: Table = {
        f"{here}.linear_fc1.weight": gate_up(f"{there}.gate_proj.weight", f"{there}.up_proj.weight", rows="shared_ffn"),
        f"{here}.linear_fc2.weight": Columns(f"{there}.down_proj.weight", cols="shared_ffn"),
    }
    return {**table, f"{here}.gate_weight": Whole(f"{_H}.mlp.{gate}.weight", ("one", "hidden"))} if gate else table


_FC1, _FC2 = f"{_L}.mlp.experts.{{expert}}.linear_fc1.weight", f"{_L}.mlp.experts.{{expert}}.linear_fc2.weight"
STACKED_EXPERTS = {_FC1: f"{_H}.mlp.experts.gate_up_proj", _FC2: f"{_H}.mlp.experts.down_proj"}
"""How transformers 5 holds the experts of a layer."""


def latent_attention(model: Architecture) -> Table:
    """Of a layer whose keys and values are made of a latent vector, and its two norms."""
    here, there, down = f"{_L}.self_attention", f"{_H}.self_attn", f"{_H}.self_attn.kv_a_proj_with_mqa"
    query: Table = {f"{here}.linear_q_proj.weight": Sections(f"{there}.q_proj.weight", ("query",), ("hidden",))}
    if model.latent and model.latent.query_rank:
        query = {
            f"{here}.linear_q_down_proj.weight": Sections(f"{there}.q_a_proj.weight", ("query_latent",), ("hidden",)),
            f"{here}.linear_q_up_proj.weight": Sections(f"{there}.q_b_proj.weight", ("query",), ("query_latent",)),
            f"{here}.q_layernorm.weight": Whole(f"{there}.q_a_layernorm.weight", ("query_latent",)),
        }
    return {
        f"{_L}.input_layernorm.weight": Whole(f"{_H}.input_layernorm.weight"),
        **query,
        f"{here}.linear_kv_down_proj.weight": Sections(f"{down}.weight", ("latent_down",), ("hidden",)),
        f"{here}.linear_kv_up_proj.weight": Sections(f"{there}.kv_b_proj.weight", ("latent_up",), ("latent",)),
        f"{here}.kv_layernorm.weight": Whole(f"{there}.kv_a_layernorm.weight", ("latent",)),
        f"{here}.linear_proj.weight": Columns(f"{there}.o_proj.weight", cols="value"),
        f"{_L}.pre_mlp_layernorm.weight": Whole(f"{_H}.post_attention_layernorm.weight"),
    }


def qk_norm(query: str = "head_dim", key: str = "head_dim") -> Table:
    """Norms of queries and keys, of these sizes."""
    return {
        f"{_L}.self_attention.q_layernorm.weight": Whole(f"{_H}.self_attn.q_norm.weight", (query,)),
        f"{_L}.self_attention.k_layernorm.weight": Whole(f"{_H}.self_attn.k_norm.weight", (key,)),
    }


def experts(
    block: str = "mlp", gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj", *, ffn: str = "moe_ffn"
) -> Table:
    """Router and experts, by the names that the block and an expert's matrices have."""
    expert = f"{_H}.{block}.experts.{{expert}}"
    return {
        f"{_L}.mlp.router.weight": Whole(f"{_H}.{block}.gate.weight", ("experts", "hidden")),
        _FC1: gate_up(f"{expert}.{gate}.weight", f"{expert}.{up}.weight", rows=ffn),
        _FC2: Columns(f"{expert}.{down}.weight", cols=ffn),
    }


def correction_bias(tensor: str) -> Table:
    """What is added to the scores for the choice of experts, by the name that it has in a layer."""
    return {f"{_L}.mlp.router.expert_bias": Buffer(f"{_H}.{tensor}", ("experts",))}
