"""Multi-head latent attention as Megatron-Core has it, with the sharding and the norms that checkpoints need."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.fusions.fused_mla_yarn_rope_apply import fused_apply_mla_rope_for_q
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import all_to_all_hp2sp, gather_from_sequence_parallel_region
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

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        inference_context: None = None,
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """`[S, B, hidden]` of this rank's tokens to queries, keys `[T, B, heads, a]` and values of all of them, packed
        ones without B. The stock method rotates sequence by sequence and reads their lengths from the GPU, each layer
        anew; its kernels take no plain part of 192 numbers, as GLM-4.7-Flash's."""
        sizes, heads = self.config, self.num_attention_heads_per_partition
        query, latents = self._qkv_down_projection(hidden_states)
        latent, rotary_key = latents.split([sizes.kv_lora_rank, sizes.qk_pos_emb_head_dim], dim=-1)
        if self.pg_collection.tp.size() > 1:
            rotary_key = gather_from_sequence_parallel_region(rotary_key, group=self.pg_collection.tp)
        if sizes.q_lora_rank is None:
            query = self.linear_q_proj(query)[0]
        else:
            query = self.linear_q_up_proj(self.q_layernorm(query))[0]
        both = self.linear_kv_up_proj(self.kv_layernorm(latent))[0].unflatten(-1, (heads, -1))
        key, value = both.split([sizes.qk_head_dim, sizes.v_head_dim], dim=-1)
        tables = self.rotary_pos_emb(len(query), packed_seq_params, query.device)
        query = apply_rotary(query.unflatten(-1, (heads, -1)), *tables)
        rotary_key = apply_rotary(rotary_key.unsqueeze(-2), *tables).expand(-1, -1, heads, -1)
        key = torch.cat([key, rotary_key], dim=-1)
        if packed_seq_params is not None:
            query, key, value = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        return query, key, value, None, None

    def _own_tokens(self, columns: Tensor) -> Tensor:
        ranks = self.pg_collection.tp.size()
        if ranks == 1:
            return columns
        if not self.config.sequence_parallel:
            raise NotImplementedError("latent attention with tensor parallelism needs sequence parallelism")
        tokens, batch, _ = columns.shape
        return all_to_all_hp2sp(columns, self.pg_collection.tp).view(tokens // ranks, batch, -1)


class SharedRotary(torch.nn.Module):
    """Cosines and sines of the angles of this rank's rows, times a factor, from frequencies that are given. One for all
    layers of a chunk, which ask for the same microbatch's."""

    def __init__(self, frequencies: Tensor, factor: float, group: torch.distributed.ProcessGroup) -> None:
        super().__init__()
        self.frequencies, self.factor, self.group = frequencies, factor, group
        self._last: tuple[PackedSeqParams | None, tuple[Tensor, Tensor]] | None = None

    def forward(self, rows: int, pack: PackedSeqParams | None, device: torch.device) -> tuple[Tensor, Tensor]:
        """`[rows, 1, 1, rotary_dim]` each, float32; the second half repeats the first. Nothing but the
        first call waits for a GPU."""
        if self._last is None or self._last[0] is not pack or len(self._last[1][0]) != rows:
            positions = self._positions(rows, pack, device)
            self.frequencies = self.frequencies.to(device)  # once: a copy from the host waits for a GPU
            angles = torch.outer(positions.float(), self.frequencies).repeat(1, 2)[:, None, None]
            self._last = pack, (angles.cos() * self.factor, angles.sin() * self.factor)
        return self._last[1]

    def _positions(self, rows: int, pack: PackedSeqParams | None, device: torch.device) -> Tensor:
        """Of rows in their sequences, of which every context-parallel rank has two parts (`zigzag_rows`). Megatron-Core
        gives its layers no `position_ids`, which are these."""
        row, ranks, rank = torch.arange(rows, device=device), self.group.size(), self.group.rank()
        if pack is None:
            if ranks > 1:
                raise NotImplementedError("context parallelism takes packed sequences")
            return row
        assert pack.cu_seqlens_q is not None
        ends = pack.cu_seqlens_q.long() // ranks
        sequence = torch.searchsorted(ends[1:], row, right=True).clamp(max=len(ends) - 2)
        place, part = row - ends[sequence], (ends[1:] - ends[:-1])[sequence] // 2
        if ranks == 1:
            return place
        return place + torch.where(place < part, rank, 2 * ranks - rank - 2) * part


def apply_rotary(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate`, by `rotate_in_one_launch` where that can: `states` may be overwritten."""
    size = cos.shape[-1]
    # Triton's ranges are powers of two; the kernel counts the numbers of `states` in 32 bits.
    fused = states.is_cuda and size % 4 == 0 and size.bit_count() == 1 and states.numel() < 1 << 31
    return (rotate_in_one_launch if fused else rotate)(states, cos, sin)


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the last `rotary_dim` of `[S, B, heads, d]`, in pairs (x_2i, x_2i+1), by float32 tables
    `[S, 1, 1, rotary_dim]`:

        out = [x_plain, x_even cos - x_odd sin, x_odd cos + x_even sin]

    Even ones first, in queries as in keys, so that scores stay. Of the type of `states`, computed in float32 or what is
    more exact. No collectives.
    """
    rotary = cos.shape[-1]
    plain = states.shape[-1] - rotary
    even, odd = states[..., plain::2], states[..., plain + 1 :: 2]
    cos, sin = (table[..., : rotary // 2] for table in (cos, sin))
    turned = torch.cat([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    return torch.cat([states[..., :plain], turned.to(states.dtype)], dim=-1)


def rotate_in_one_launch(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate` by Megatron-Core's kernel for GPUs. It overwrites contiguous `states`, and in the backward the gradient
    of the result: there must be no other use for either.

    Its blocks of heads, tuned at the first call, write past the heads of a token that they do not divide. It is
    therefore given groups of heads, as many in each as the largest power of two that divides their number.
    """
    size, rotary = states.shape[-1], cos.shape[-1]
    parts = states.contiguous().view(len(states), -1, states.shape[2] & -states.shape[2], size)
    rotated: Tensor = fused_apply_mla_rope_for_q(parts, cos, sin, size - rotary, rotary)
    return rotated.view_as(states)


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
