"""Decoder layers in plain torch, without TransformerEngine: attention of packed sequences, a norm, and the spec."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import RowParallelLinear, gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint

from megatron_dppo.batch.context_parallel import zigzag_rows


class PackedAttention(MegatronModule):
    """Causal softmax attention with grouped queries; packed (THD) or batched (SBHD), on this rank's heads.

        out_t = sum_{t - w < s <= t, s in the sequence of t} softmax_s(scale * q_t . k_s) v_s

    w is the layer's window (`TransformerConfig.window_size`, `window_attn_skip_freq`) or infinite. With `softmax_type`
    "learnable" each head's `softmax_offset` is one more score of every softmax, of no value.

    Packed: query `[T, heads, d]`, key and value `[T, groups, d]`, `packed_seq_params` with `cu_seqlens_q`; returns
    `[T, heads * d]`. Sequences are padded to one batch, so that one fused call serves them all. Rows past the last
    sequence (padding of the pack) return 0. Batched: `[S, B, ...]` in, `[S, B, heads * d]` out.

    Context parallelism (packed only): every rank gives its rows of every sequence (`zigzag_rows`); one all-gather of
    keys and values over the group in the forward and one reduce-scatter of their gradients in the backward. Slower than
    TransformerEngine's ring (each rank computes all rows and keeps its own) and exact. Otherwise no collectives: heads
    are sharded by tensor parallelism before and after. Gradients flow to all three inputs.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        self.tensor_group = pg_collection.tp if pg_collection else None
        self.context_group = None
        if config.context_parallel_size > 1:
            assert pg_collection is not None
            self.context_group = pg_collection.cp
        if attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
            raise NotImplementedError(f"PackedAttention is causal; the layer asks for {attn_mask_type}")
        if (config.attention_dropout if attention_dropout is None else attention_dropout) != 0.0:
            raise NotImplementedError("PackedAttention has no dropout; set attention_dropout to 0")
        self.window: int | None = None
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            self.window = config.window_size[0] + 1
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
        elif config.softmax_type != "vanilla":
            raise NotImplementedError(f"PackedAttention has no softmax of type {config.softmax_type}")
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        if attention_bias is not None:
            raise NotImplementedError("PackedAttention takes no attention bias")
        if packed_seq_params is None:
            if self.context_group is not None:
                raise NotImplementedError("PackedAttention splits packed sequences over ranks, not batches")
            batched = [t.permute(1, 2, 0, 3) for t in (query, key, value)]
            return self._attend(*batched).permute(2, 0, 1, 3).flatten(2)

        if self.context_group is not None:
            return self._forward_split(query, key, value, packed_seq_params, self.context_group)
        return self._forward_packed(query, key, value, packed_seq_params)

    def _forward_split(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: PackedSeqParams,
        group: torch.distributed.ProcessGroup,
    ) -> torch.Tensor:
        """This rank's rows against the keys and values of all ranks."""
        cu = params.cu_seqlens_q
        assert cu is not None
        lengths = (cu[1:] - cu[:-1]).numpy()
        of_rank = [torch.from_numpy(zigzag_rows(lengths, rank, group.size())) for rank in range(group.size())]
        own, everywhere = of_rank[group.rank()], torch.cat(of_rank)
        if len(own) != query.shape[0]:
            raise ValueError(f"this rank has {query.shape[0]} rows of a pack of {int(cu[-1])}, expected {len(own)}")

        def whole(part: torch.Tensor) -> torch.Tensor:
            gathered = gather_from_sequence_parallel_region(part, group=group)
            return gathered.new_zeros(gathered.shape).index_copy(0, everywhere, gathered)

        placed = query.new_zeros(len(everywhere), *query.shape[1:]).index_copy(0, own, query)
        return self._forward_packed(placed, whole(key), whole(value), params).index_select(0, own)

    def _forward_packed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed_seq_params: PackedSeqParams
    ) -> torch.Tensor:
        rows, batch, position, longest = _pack_index(packed_seq_params, query.shape[0])
        padded = []
        for packed in (query, key, value):
            grid = packed.new_zeros(batch, longest, *packed.shape[1:])
            padded.append(grid.view(-1, *packed.shape[1:]).index_copy(0, position, packed[:rows]).view_as(grid))
        out = self._attend(*[t.transpose(1, 2) for t in padded]).transpose(1, 2).flatten(0, 1)
        out = out.index_select(0, position).flatten(1)
        return F.pad(out, (0, 0, 0, query.shape[0] - rows))

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """`[B, heads, L, d]`; padding sits after every sequence, so the causal mask alone hides it."""
        if self.window is not None or self.softmax_offset is not None:
            return self._attend_plainly(query, key, value)
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.scale, enable_gqa=query.shape[1] != key.shape[1]
        )

    def _attend_plainly(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The same by all scores, with window and offset."""
        length, shared = query.shape[2], query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
        scores = (query @ key.transpose(2, 3)) * self.scale
        row = torch.arange(length, device=query.device)
        back = row[:, None] - row
        hidden = (back < 0) | (back >= (self.window or length))
        scores = scores.masked_fill(hidden, float("-inf"))
        if self.softmax_offset is not None:
            offset = self.softmax_offset[:, None, None].to(scores.dtype).expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, offset], dim=-1)
        shares = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        return shares[..., :length].to(value.dtype) @ value

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Of the offsets each rank has those of its heads."""
        groups = {"tp_group": self.tensor_group, "dp_cp_group": (metadata or {}).get("dp_cp_group")}
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets, **groups)


class SeparateOutput(RowParallelLinear):
    """A RowParallelLinear whose output is not a view: Megatron-Core's MLP adds an expert's bias to it in place, which
    autograd refuses of one."""

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = super().forward(input_)
        return output.clone(), bias


def _pack_index(params: PackedSeqParams, tokens: int) -> tuple[int, int, torch.Tensor, int]:
    """(packed rows in use, sequences, each row's place in the padded `[B * longest]` grid, longest)."""
    cu = params.cu_seqlens_q_padded if params.cu_seqlens_q_padded is not None else params.cu_seqlens_q
    if params.qkv_format != "thd" or cu is None:
        raise ValueError("PackedAttention needs packed_seq_params with qkv_format='thd' and cu_seqlens_q")
    lengths = cu[1:].long() - cu[:-1].long()
    rows, longest = int(cu[-1]), int(lengths.max())
    if rows > tokens or (lengths < 0).any() or int(cu[0]) != 0:
        raise ValueError(f"cu_seqlens_q {cu.tolist()} must rise from 0 to at most the {tokens} packed rows")
    if params.max_seqlen_q is not None and int(params.max_seqlen_q) != longest:
        # Megatron-Core takes a table of max_seqlen_q positions that is as long as the pack for one of absolute
        # positions in the pack, and then rotates every sequence after the first by a wrong angle.
        raise ValueError(f"max_seqlen_q is {params.max_seqlen_q}, the longest packed sequence has {longest} rows")
    return rows, len(lengths), grid_position(cu), longest


def grid_position(cu: torch.Tensor) -> torch.Tensor:
    """Where each packed row is, int64 `[cu[-1]]`, in a `[sequences * longest]` grid of its sequences side by side."""
    cu = cu.long()
    lengths = cu.diff()
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=cu.device), lengths)
    return torch.arange(int(cu[-1]), device=cu.device) + sequence * lengths.max() - cu[:-1][sequence]


class TorchRMSNorm(torch.nn.RMSNorm):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, or with 1 + weight
    (`layernorm_zero_centered_gamma`); input and output keep their sharding.

    Under sequence parallelism each tensor-parallel rank sees a part of the tokens, so the gradient of `weight` is
    partial: the parameter is marked `sequence_parallel`, and Megatron-Core's `finalize_model_grads` sums it over the
    tensor-parallel group (the stock torch norm refuses sequence parallelism for want of that mark).
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        if config.normalization != "RMSNorm":
            raise NotImplementedError(f"TorchRMSNorm is an RMSNorm; the model asks for {config.normalization}")
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.centred = config.layernorm_zero_centered_gamma

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.centred:
            return super().forward(x)
        exact = torch.promote_types(x.dtype, torch.float32)  # 1 + weight has too few digits in half precision
        return F.rms_norm(x.to(exact), self.normalized_shape, 1 + self.weight.to(exact), self.eps).to(x.dtype)


def local_block_spec(
    config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None
) -> TransformerBlockSubmodules:
    """Megatron-Core's local spec for the layers of one pipeline stage, with attention that knows packed sequences and
    a norm that knows sequence parallelism. Experts run one after another (no grouped GEMM without a GPU)."""
    stock = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage, pp_rank=pp_rank
    )
    layers = []
    for stock_layer in stock.layer_specs:
        layer = copy.deepcopy(stock_layer)
        layer.submodules.input_layernorm = TorchRMSNorm
        layer.submodules.pre_mlp_layernorm = TorchRMSNorm
        if getattr(layer.submodules.mlp, "func", None) is MoELayer:
            # Only a dense MLP's norm is part of its first matrix with TransformerEngine, and checkpoints have its names
            layer.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
            if config.add_bias_linear:
                experts = layer.submodules.mlp.keywords["submodules"].experts
                experts.keywords["submodules"].linear_fc2 = SeparateOutput
        else:
            layer.submodules.sharded_state_dict_keys_map["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = PackedAttention
        if attention.q_layernorm not in (None, IdentityOp):
            attention.q_layernorm = attention.k_layernorm = TorchRMSNorm
        layers.append(layer)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=TorchRMSNorm)
