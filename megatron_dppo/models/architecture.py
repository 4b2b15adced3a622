"""What a decoder is made of: sizes and kinds of layers, which its family reads from config.json."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

VOCAB_MULTIPLE = 128
"""The vocabulary is padded to a multiple of this (and of the tensor-parallel size, where that is no divisor of it)."""

QKNorm = Literal["none", "head", "projection"]


@dataclass(frozen=True, kw_only=True)
class MoE:
    """Mixture-of-experts layers: softmax over `experts` logits, the `topk` likeliest run."""

    experts: int
    topk: int
    intermediate_size: int
    normalise: bool
    """The weights of the chosen experts are divided by their sum."""
    layers: tuple[bool, ...]
    """Per layer: mixture of experts (True) or one dense MLP."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A pre-norm decoder: RMSNorm, rotary positions, grouped-query attention, gated MLPs. Sizes are of the whole model,
    never of a shard."""

    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    """Of the dense MLP."""
    vocab_size: int
    tied: bool
    """Output layer and embedding are one matrix."""
    rms_norm_eps: float
    max_position_embeddings: int
    qkv_bias: bool = False
    """Query, key and value projections carry a bias."""
    qk_norm: QKNorm = "none"
    """RMSNorm of queries and keys before the rotation: none, of each head, or of all
    heads of the projection at once."""
    moe: MoE | None = None

    @cached_property
    def dims(self) -> dict[str, int]:
        """Sizes by the names that tables use."""
        sizes = {
            "hidden": self.hidden_size,
            "head_dim": self.head_dim,
            "query": self.heads * self.head_dim,
            "key": self.kv_heads * self.head_dim,
            "ffn": self.intermediate_size,
        }
        if self.moe:
            sizes |= {"experts": self.moe.experts, "moe_ffn": self.moe.intermediate_size}
        return sizes

    @property
    def has_dense_layers(self) -> bool:
        return self.moe is None or not all(self.moe.layers)

    def is_moe_layer(self, layer: int) -> bool:
        return self.moe is not None and self.moe.layers[layer]

    def padded_vocab_size(self, tensor_parallel: int) -> int:
        """Rows of the embedding over all ranks: the least multiple of 128 and of `tensor_parallel`, so that checkpoints
        of different tensor-parallel sizes agree on it wherever it divides 128."""
        multiple = math.lcm(VOCAB_MULTIPLE, tensor_parallel)
        return -(-self.vocab_size // multiple) * multiple
