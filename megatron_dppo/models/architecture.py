"""What a decoder is made of: sizes and kinds of layers, which its family reads from config.json."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

VOCAB_MULTIPLE = 128
"""The vocabulary is padded to a multiple of this (and of the tensor-parallel size, where that is no divisor of it)."""

QKNorm = Literal["none", "head", "projection"]
Score = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, kw_only=True)
class MoE:
    """Mixture-of-experts layers: of `experts` scores the `topk` largest say which run, and with what weight."""

    experts: int
    topk: int
    intermediate_size: int
    normalise: bool
    """The weights of the chosen experts are divided by their sum."""
    layers: tuple[bool, ...]
    """Per layer: mixture of experts (True) or one dense MLP."""
    score: Score = "softmax"
    """Of an expert: its share in the softmax over all logits, or the sigmoid of its own."""
    bias: bool = False
    """A number per expert is added to the scores for the choice alone; weights are made of the scores."""
    scaling: float = 1.0
    """Factor of the weights of the chosen experts."""
    groups: int = 1
    """Experts are divided into so many groups; 1: no limit."""
    group_topk: int = 1
    """Experts are chosen from so many groups, those whose two best scores have the largest sums."""
    shared_size: int = 0
    """Width of the MLP that every token passes beside its experts; 0: none."""


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
    rotary_factor: float = 1.0
    """Share of a head's dimensions, the first ones, that positions rotate."""
    mtp_layers: int = 0
    """Layers that a checkpoint holds after the last one, for predicting further tokens. They are not trained: their
    tensors are carried from checkpoint to checkpoint."""
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
            sizes |= {
                "experts": self.moe.experts,
                "moe_ffn": self.moe.intermediate_size,
            }
            if self.moe.shared_size:
                sizes["shared_ffn"] = self.moe.shared_size
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
