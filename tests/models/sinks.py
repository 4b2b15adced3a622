"""A tiny configuration of attention with sinks, for a CPU and for a GPU."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig


def sink_config(heads: int, groups: int, size: int, window: int, **fields: Any) -> TransformerConfig:
    """Of two layers: the first sees `window` tokens, the second all."""
    return TransformerConfig(
        num_layers=2,
        hidden_size=heads * size,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=size,
        attention_dropout=0.0,
        softmax_type="learnable",
        window_size=(window - 1, 0),
        window_attn_skip_freq=[1, 0],
        **fields,
    )
