"""What a decoder is made of: sizes and kinds of layers, which its family reads from config.json."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

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
    linear_bias: bool = False
    """An expert's matrices carry biases."""
    shared_size: int = 0
    """Width of the MLP that every token passes beside its experts; 0: none."""
    shared_gate: bool = False
    """What that MLP gives is multiplied by the sigmoid of a projection of the token to one number."""


@dataclass(frozen=True, kw_only=True)
class DeltaRule:
    """Layers that have the gated delta rule (arXiv 2412.06464) in place of attention. Each value head keeps a matrix
    `S [key_dim, value_dim]` of all tokens so far in place of their keys and values:

        S_t = exp(g_t) S_{t-1} + k_t beta_t (v_t - exp(g_t) S_{t-1}^T k_t)^T,  o_t = S_t^T q_t / sqrt(key_dim)

    with queries and keys of length 1. Queries, keys and values pass a causal convolution over tokens before, and
    outputs an RMSNorm and a gate behind."""

    layers: tuple[bool, ...]
    """Per layer: the delta rule (True) or attention."""
    key_heads: int
    value_heads: int
    """A multiple of the key heads, each of which serves as many."""
    key_dim: int
    value_dim: int
    """Of one head."""
    convolution: int
    """Tokens that a convolution sees, the token itself included."""

    @property
    def width(self) -> int:
        """Of all values of a token."""
        return self.value_heads * self.value_dim

    @property
    def convolved(self) -> int:
        """Of all queries, keys and values of a token."""
        return 2 * self.key_heads * self.key_dim + self.width


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention (arXiv 2405.04434): keys and values of all heads are made of one short vector, a
    normed projection of the token. Every head has as many key and value heads as queries."""

    query_rank: int | None
    """Length of the vector that queries are made of in the same way; None: of the token itself."""
    rank: int
    """Length of the vector that keys and values are made of."""
    plain_dim: int
    """Dimensions of a query's and key's head without positions; they stand first."""
    rotary_dim: int
    """Rotated ones, neighbours in pairs; all heads share those of the key."""
    value_dim: int
    """Of a value's head."""
    norm_eps: float = 1e-6
    """Of the norms of both vectors: not the config's `rms_norm_eps`, in DeepSeek's code and in transformers' classes.
    vLLM is told (`rollout/vllm/layers.py`)."""
    yarn_factor: float = 1.0
    """By which yarn lengthens the context; 1: no yarn."""
    mscale_all_dim: float = 0.0
    """The softmax's scale is multiplied by `(0.1 mscale_all_dim log(yarn_factor) + 1)^2`."""

    @property
    def divided(self) -> tuple[int, ...]:
        """Rows of the matrices that make the vectors, of which each tensor-parallel rank has a share."""
        rows = self.rank + self.rotary_dim
        return (rows,) if self.query_rank is None else (self.query_rank, rows)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A pre-norm decoder: RMSNorm, rotary positions, grouped-query or latent attention, gated MLPs. Sizes are of the
    whole model, never of a shard."""

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
    windows: tuple[int | None, ...] = ()
    """Per layer how many tokens one attends to, itself included; None: all before it. (): all, in every layer."""
    sinks: bool = False
    """Every softmax of a head has one more score, learned and of no value."""
    mtp_layers: int = 0
    """Layers that a checkpoint holds after the last one, for predicting further tokens. They are not trained: their
    tensors are carried from checkpoint to checkpoint."""
    output_gate: bool = False
    """What attention gives is multiplied by the sigmoid of a projection that stands beside the queries'."""
    centred_norms: bool = False
    """Norms multiply by 1 + weight, but that behind a delta rule."""
    delta: DeltaRule | None = None
    latent: Latent | None = None
    """Keys and values are made of a latent vector; `head_dim` is then that of queries and keys."""
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
        if self.sinks:
            sizes["heads"] = self.heads
        if self.delta or (self.moe and self.moe.shared_gate):
            sizes["one"] = 1
        if self.delta:
            sizes |= {
                "delta_key": self.delta.key_heads * self.delta.key_dim,
                "delta_value": self.delta.width,
                "delta_heads": self.delta.value_heads,
                "delta_head_dim": self.delta.value_dim,
                "convolution": self.delta.convolution,
            }
        if self.latent:
            sizes |= {
                "latent": self.latent.rank,
                "latent_down": self.latent.rank + self.latent.rotary_dim,
                "latent_up": self.heads * (self.latent.plain_dim + self.latent.value_dim),
                "query_latent": self.latent.query_rank or 0,
                "value": self.heads * self.latent.value_dim,
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
    def value_dim(self) -> int:
        """Of a value's head."""
        return self.latent.value_dim if self.latent else self.head_dim

    @property
    def has_dense_layers(self) -> bool:
        return self.moe is None or not all(self.moe.layers)

    def window(self, layer: int) -> int | None:
        """How many tokens one of this layer attends to; None: all before it."""
        return self.windows[layer] if self.windows else None

    def pairs(self, layer: int, lengths: np.ndarray) -> np.ndarray:
        """In this layer, of sequences so long: how many pairs of tokens, one of which attends to the other."""
        reach = np.minimum(lengths, self.window(layer) or math.inf)
        return reach * (lengths - reach / 2)

    def is_moe_layer(self, layer: int) -> bool:
        return self.moe is not None and self.moe.layers[layer]

    def is_delta_layer(self, layer: int) -> bool:
        return self.delta is not None and self.delta.layers[layer]

    @property
    def attention_layers(self) -> int:
        """Layers whose attention looks back on keys and values."""
        return self.layers - (sum(self.delta.layers) if self.delta else 0)

    def padded_vocab_size(self, tensor_parallel: int) -> int:
        """Rows of the embedding over all ranks: the least multiple of 128 and of `tensor_parallel`, so that checkpoints
        of different tensor-parallel sizes agree on it wherever it divides 128."""
        multiple = math.lcm(VOCAB_MULTIPLE, tensor_parallel)
        return -(-self.vocab_size // multiple) * multiple
