"""Multi-head latent attention as Megatron-Core has it, with the sharding and the norms that checkpoints need."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import all_to_all_hp2sp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from megatron_dppo.models.architecture import Architecture


class LatentAttention(MLASelfAttention):
    """Keys and values of H heads from `c = norm(W_down x)`, queries from a latent of their own or from x:

        k_h = [U_h c, R k],  v_h = V_h c,  q_h = [q_plain, R q_rotary]      (k, of x, is one for all heads)

    Every matrix is column-parallel, the down projections too (stock Megatron-Core has them whole on each rank with
    TransformerEngine, and divided without). Under sequence parallelism a rank turns its columns of the latents of all
    tokens into all columns of its own tokens (one all-to-all, and one in the backward), from where the stock class goes
    on: the norms see a part of the tokens, and the gradient of the rotary key, of which every rank has its own heads'
    share, is summed. The stock way with divided matrices leaves that sum out.

    Norms are modules of their own, with `Latent.norm_eps`; a query without a latent has none (the stock class would
    build one with TransformerEngine, and refuse to without).
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}

    def _qkv_down_projection(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """`[S, B, hidden]` of this rank's tokens to `[S, B, query rank]` (or as it came), `[S, B, rank + rotary]`."""
        query = hidden_states
        if self.config.q_lora_rank is not None:
            query = self._own_tokens(self.linear_q_down_proj(hidden_states)[0])
        return query, self._own_tokens(self.linear_kv_down_proj(hidden_states)[0])

    def _own_tokens(self, columns: Tensor) -> Tensor:
        ranks = self.pg_collection.tp.size()
        if ranks == 1:
            return columns
        if not self.config.sequence_parallel:
            raise NotImplementedError("latent attention with tensor parallelism needs sequence parallelism")
        tokens, batch, _ = columns.shape
        return all_to_all_hp2sp(columns, self.pg_collection.tp).view(tokens // ranks, batch, -1)


class SharedRotary(RotaryEmbedding):
    """Angles `[tokens, 1, 1, dimensions]` of positions from 0 on, and the factor of their cosines and sines, from
    frequencies that are given. One for all layers of a chunk, which ask for the same."""

    def __init__(self, frequencies: Tensor, factor: float, group: torch.distributed.ProcessGroup) -> None:
        super().__init__(2 * len(frequencies), 1.0, cp_group=group)
        device: torch.device = self.inv_freq.device  # type: ignore[has-type]
        self.inv_freq, self.factor = frequencies.to(device, copy=True), factor
        self._last: tuple[int, Tensor] | None = None

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> Any:
        if not packed_seq and self.cp_group.size() > 1:
            raise NotImplementedError("context parallelism takes packed sequences")
        if self._last is None or self._last[0] != max_seq_len:
            self._last = max_seq_len, self.get_emb(max_seq_len)
        return self._last[1], self.factor


def share_rotary(gpt: GPTModel, frequencies: Tensor, factor: float) -> None:
    """Give all layers of a chunk one rotation, by these frequencies `[rotary_dim / 2]` and this factor."""
    attentions = [layer.self_attention for layer in gpt.decoder.layers]
    rotary = SharedRotary(frequencies, factor, gpt.pg_collection.cp)
    for attention in attentions:
        attention.rotary_pos_emb = rotary


def spec(block: TransformerBlockSubmodules, model: Architecture, groups: ProcessGroupCollection) -> None:
    """Put it into every layer, with the linear layers and the norm of the block's kind."""
    assert model.latent is not None
    stock: Any = block.layer_norm
    eps = model.latent.norm_eps

    def norm(*, hidden_size: int, config: Any, **unused: Any) -> torch.nn.Module:
        return stock(config=config, hidden_size=hidden_size, eps=eps)

    for layer in block.layer_specs or ():
        attention = layer.submodules.self_attention
        attention.module, parts = LatentAttention, attention.submodules
        column = parts.linear_q_proj
        parts.linear_q_down_proj = parts.linear_q_up_proj = column
        parts.linear_kv_down_proj = parts.linear_kv_up_proj = column
        parts.q_layernorm = parts.kv_layernorm = norm
