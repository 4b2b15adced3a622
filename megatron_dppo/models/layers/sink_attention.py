"""Attention with sinks in memory that grows with a sequence, not with its square, from kernels that know no sinks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_dppo.compat.packed_attention import PackedAttention
from megatron_dppo.models.architecture import Architecture


@dataclass(frozen=True)
class CausalPack:
    """Which scores there are: of every token with itself and those before it in its sequence, `window` in all."""

    ends: Tensor
    """int32 `[sequences + 1]`, from 0 to the number of rows."""
    longest: int
    window: int | None
    scale: float
    """Of the scores."""


class Kernels(Protocol):
    """Softmax attention without sinks. Queries and what is like them `[T, heads, d]`, keys and values `[T, groups, d]`,
    logarithms of the softmax's sums, `lse`, `[heads, T]`, float32 or more exact."""

    def take(self, query: Tensor) -> bool:
        """Whether they compute with such queries."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, pack: CausalPack) -> tuple[Tensor, Tensor]:
        """Output and lse."""

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, pack: CausalPack
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value, with shares exp(score - lse) and row sums of grad * out."""


class FlashKernels:
    """torch's FlashAttention 2, as `torch.nn.attention.varlen` calls it (its own gradient takes none of the lse).

    Queries' gradients are sums by atomic additions, whose order differs from run to run in the last digits, unless
    `torch.use_deterministic_algorithms(True)`.
    """

    def take(self, query: Tensor) -> bool:
        halves = query.dtype in (torch.bfloat16, torch.float16)
        return query.is_cuda and halves and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256

    def forward(self, query: Tensor, key: Tensor, value: Tensor, pack: CausalPack) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, *_lengths(pack), 0.0, pack.window is None, False, **_options(pack)
        )
        return out, lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, pack: CausalPack
    ) -> tuple[Tensor, Tensor, Tensor]:
        random = torch.empty(2, dtype=torch.uint64, device=query.device)  # of dropout, which there is none
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            *(grad, query, key, value, out, lse, *_lengths(pack)),
            *(0.0, pack.window is None, random, random),
            **_options(pack),
        )
        return grads


def _lengths(pack: CausalPack) -> tuple[Tensor, Tensor, int, int]:
    return pack.ends, pack.ends, pack.longest, pack.longest


def _options(pack: CausalPack) -> dict[str, Any]:
    back = -1 if pack.window is None else pack.window - 1  # the token itself is not counted
    return {"scale": pack.scale, "window_size_left": back, "window_size_right": 0}


class FlashWithSinks(torch.autograd.Function):
    """`out_i = sum_j P_ij v_j`, `P_ij = exp(s_ij - lse_i)`, `lse_i = log(exp(sink) + sum_j exp(s_ij))`, each head with
    its own sink, s and j those of a `CausalPack`.

    From output and logarithm without sinks, O and L: `lse = logaddexp(L, sink)` and `out = O exp(L - lse)`. Given these
    two, the backward of a softmax without sinks is that of one with them, since a sink has no value: with
    `delta_i = grad_i . out_i`, `ds_ij = P_ij (grad_i . v_j - delta_i)`, and `dsink = -sum_i exp(sink - lse_i) delta_i`.

    query and the result `[T, heads, d]`, key and value `[T, groups, d]`, sinks `[heads]`, all of this rank's heads. No
    collectives. Gradients flow to all four. Kept for the backward: query, key, value, out, lse.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, pack: CausalPack, kernels: Kernels
    ) -> Tensor:
        value = value.contiguous()  # as a view it would keep the product of queries, keys and values
        out, plain = kernels.forward(query, key, value, pack)
        lse = torch.logaddexp(plain, sinks.to(plain.dtype)[:, None])
        out.mul_((plain - lse).exp().T[..., None])
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.pack, ctx.kernels = pack, kernels
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        of_sinks = None
        if ctx.needs_input_grad[3]:
            delta = (grad.to(lse.dtype) * out).sum(-1)
            of_sinks = -((sinks.to(lse.dtype)[:, None] - lse).exp() * delta.T).sum(-1).to(sinks.dtype)
        return *ctx.kernels.backward(grad, query, key, value, out, lse, ctx.pack), of_sinks, None, None


class SinkAttention(PackedAttention):
    """`PackedAttention` of a model with sinks, whose packs go to kernels where these take them: in bfloat16 or float16
    on a GPU. Every row of such a pack is in a sequence."""

    kernels: Kernels = FlashKernels()

    def _forward_packed(
        self, query: Tensor, key: Tensor, value: Tensor, packed_seq_params: PackedSeqParams
    ) -> torch.Tensor:
        ends, longest = packed_seq_params.cu_seqlens_q, packed_seq_params.max_seqlen_q
        if not self.kernels.take(query):
            return super()._forward_packed(query, key, value, packed_seq_params)
        assert ends is not None
        assert longest is not None
        pack = CausalPack(ends, int(longest), self.window, self.scale)
        out: Tensor = FlashWithSinks.apply(query, key, value, self.softmax_offset, pack, self.kernels)
        return out.flatten(1)


def spec(block: TransformerBlockSubmodules, model: Architecture, groups: ProcessGroupCollection) -> None:
    """Put it into the attention of every layer. TransformerEngine 2.12's was seen to hold all scores of packed
    sequences with sinks in memory: 95 GiB for two layers of gpt-oss-20b and 16,384 tokens."""
    for layer in block.layer_specs or ():
        layer.submodules.self_attention.submodules.core_attention = SinkAttention
