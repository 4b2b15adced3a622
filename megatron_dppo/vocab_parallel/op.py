"""The op: hidden states and a vocabulary shard of the LM head to TokenStats, with gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from megatron_dppo.vocab_parallel import chunked, fused
from megatron_dppo.vocab_parallel.collectives import (
    gather_sequence,
    merge_over_ranks,
    reduce_replicated,
    reduce_sequence,
)
from megatron_dppo.vocab_parallel.rows import put_rows, rows_of_mask, take_rows
from megatron_dppo.vocab_parallel.shard import VocabShard
from megatron_dppo.vocab_parallel.stats import TokenStats, finish
from megatron_dppo.vocab_parallel.weight_grad import WeightGrad

HiddenLayout = Literal["replicated", "sequence_sharded"]
Implementation = Literal["auto", "chunked", "fused"]


@dataclass(frozen=True)
class _Plan:
    """Everything about a call that is no tensor."""

    shard: VocabShard
    temperature: float
    sequence_sharded: bool
    fused: bool
    token_chunk: int | None
    vocab_chunk: int | None


def token_stats(
    hidden: Float[Tensor, "T H"] | Float[Tensor, "T_local H"],
    weight: Float[Tensor, "V_local H"],
    token_ids: Int[Tensor, " T"],
    topk_ids: Int[Tensor, "T K"] | None = None,
    *,
    shard: VocabShard,
    temperature: float = 1.0,
    hidden_layout: HiddenLayout = "replicated",
    loss_mask: Bool[Tensor, " T"] | None = None,
    implementation: Implementation = "auto",
    token_chunk: int | None = None,
    vocab_chunk: int | None = None,
) -> TokenStats:
    """Log-probability, entropy and top-K log-probabilities of each token, without ``[T, V]`` or ``[T, V_local]``.

    With ``z = hidden weight^T / temperature`` over the columns below ``shard.vocab_size`` of all ranks::

        log pi(i) = z_i - ln sum_j exp z_j          entropy = -sum_j p_j ln p_j
        dL/dz_j = sum_i g_i (1[j = i] - p_j) - g_H p_j (ln p_j + entropy)

    where i runs over the token and its top-K ids, whatever rank holds them.

    Arguments
        hidden: ``[T, H]``, the same on every rank; or with ``hidden_layout="sequence_sharded"`` this rank's
            ``[T / ranks, H]`` in rank order, which the op gathers.
        weight: this rank's rows ``[shard.start, shard.stop)`` of the LM head; the head has no bias.
        token_ids: global ids, the same on every rank; ``-1`` marks a row without a token: constants, no gradient.
        topk_ids: global ids, a different set for each row, in any order, repeats allowed; ``-1`` is an absent id.
        temperature: divides the logits.
        loss_mask: rows where it is 0 are dropped before any product and come back as constants (see TokenStats).
        implementation: ``"chunked"`` is plain PyTorch, ``"fused"`` the CUDA kernels, ``"auto"`` the latter where they
            run.
        token_chunk, vocab_chunk: tile of logits alive at once; results differ by rounding only.

    Returns float32 (float64 for float64 inputs), logits in float32 until after the exponential.

    Collectives over ``shard.group``: forward one all-gather of ``[3 + 1 + K, N]`` statistics (``4 (4 + K)`` bytes a
    token and rank in float32), plus the gather of a sequence-sharded hidden; backward that gather again, and one
    all-reduce (replicated) or reduce-scatter (sequence-sharded) of the hidden gradient, so it is reduced exactly once.
    They run even where no row is left.

    Gradients flow from ``logp``, ``entropy`` and ``topk_logp`` to ``hidden`` and ``weight``; ranks must back-propagate
    the same gradients. What no loss uses costs nothing: the backward is then that of the others alone. Rows whose
    gradients are all zero are dropped before the backward's products. With Megatron's
    ``weight.main_grad`` the weight gradient is added there (see :class:`WeightGrad`). Not twice differentiable.

    Raises ``ValueError`` for shapes or ids that do not fit together.
    """
    sequence_sharded = _check(hidden, weight, token_ids, topk_ids, loss_mask, shard, temperature, hidden_layout)
    use_fused = _use_fused(hidden, weight, implementation)
    plan = _Plan(shard, temperature, sequence_sharded, use_fused, token_chunk, vocab_chunk)
    logp, row_entropy, topk_logp = _TokenStats.apply(hidden, weight, token_ids, topk_ids, rows_of_mask(loss_mask), plan)
    return TokenStats(logp, row_entropy, topk_logp)


def _check(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    topk_ids: Tensor | None,
    loss_mask: Tensor | None,
    shard: VocabShard,
    temperature: float,
    hidden_layout: str,
) -> bool:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden must be [T, H] and weight [V_local, H], got {list(hidden.shape)} and {list(weight.shape)}"
        )
    if hidden.dtype != weight.dtype or not hidden.is_floating_point():
        raise ValueError(f"hidden and weight must share a floating type, got {hidden.dtype} and {weight.dtype}")
    if weight.shape[0] != shard.stop - shard.start:
        raise ValueError(
            f"weight has {weight.shape[0]} rows, the shard [{shard.start}, {shard.stop}) has {shard.stop - shard.start}"
        )
    if hidden_layout not in ("replicated", "sequence_sharded"):
        raise ValueError(f"hidden_layout must be 'replicated' or 'sequence_sharded', got {hidden_layout!r}")
    sequence_sharded = hidden_layout == "sequence_sharded"
    rows = hidden.shape[0] * (shard.world_size if sequence_sharded else 1)
    if token_ids.shape != (rows,):
        raise ValueError(
            f"token_ids must be [{rows}] for hidden {list(hidden.shape)} ({hidden_layout}, "
            f"{shard.world_size} rank(s)), got {list(token_ids.shape)}"
        )
    if topk_ids is not None and (topk_ids.ndim != 2 or topk_ids.shape[0] != rows):
        raise ValueError(f"topk_ids must be [{rows}, K], got {list(topk_ids.shape)}")
    if loss_mask is not None and loss_mask.shape != (rows,):
        raise ValueError(f"loss_mask must be [{rows}], got {list(loss_mask.shape)}")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    return sequence_sharded


def _use_fused(hidden: Tensor, weight: Tensor, implementation: str) -> bool:
    if implementation not in ("auto", "chunked", "fused"):
        raise ValueError(f"implementation must be 'auto', 'chunked' or 'fused', got {implementation!r}")
    if implementation == "chunked":
        return False
    reason = fused.unusable(hidden, weight)
    if reason is not None and implementation == "fused":
        raise ValueError(f"implementation='fused' cannot run here: {reason}; use 'auto' or 'chunked'")
    return reason is None


class _TokenStats(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        token_ids: Tensor,
        topk_ids: Tensor | None,
        rows: Tensor | None,
        plan: _Plan,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        shard, total = plan.shard, token_ids.shape[0]
        wanted = token_ids[:, None] if topk_ids is None else torch.cat([token_ids[:, None], topk_ids], dim=1)
        wanted = take_rows(wanted, rows)
        full = gather_sequence(hidden, shard.group) if plan.sequence_sharded else hidden.contiguous()
        local = (fused if plan.fused else chunked).forward(
            take_rows(full, rows),
            weight[: shard.valid],
            wanted,
            start=shard.start,
            vocab_size=shard.vocab_size,
            temperature=plan.temperature,
            token_chunk=plan.token_chunk,
            vocab_chunk=plan.vocab_chunk,
        )
        lse, entropy, logp = finish(merge_over_ranks(local, shard.group))

        ctx.plan = plan
        # A leaf's saved tensor may come back as another object (saved-tensor hooks), which would lack main_grad.
        ctx.weight = weight
        ctx.set_materialize_grads(False)
        absent = token_ids == -1
        topk_logp = None
        if topk_ids is not None:
            topk_logp = topk_rows(put_rows(logp[:, 1:], rows, total), topk_ids, absent)
        row_entropy = put_rows(entropy, rows, total).masked_fill(absent, 0.0)
        token_logp = put_rows(logp[:, 0], rows, total).masked_fill(absent, 0.0)
        ctx.save_for_backward(hidden, weight, token_ids, topk_ids, rows, lse, entropy, token_logp, topk_logp)
        return token_logp, row_entropy, topk_logp

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None, grad_topk: Tensor | None
    ) -> tuple[Any, ...]:
        hidden, weight, token_ids, topk_ids, rows, lse, entropy, logp, topk_logp = ctx.saved_tensors
        plan: _Plan = ctx.plan
        shard, total = plan.shard, token_ids.shape[0]
        need_hidden, need_weight = ctx.needs_input_grad[:2]

        # Column 0 is the token's; the others are there where a loss used them.
        g = (token_ids.new_zeros(total, dtype=lse.dtype) if grad_logp is None else grad_logp)[:, None]
        ids, logp = token_ids[:, None], logp[:, None]
        if grad_topk is not None:
            # An absent id's log-probability is -inf: what comes back through it may be anything.
            g = torch.cat([g, grad_topk.masked_fill(topk_ids == -1, 0.0)], dim=1)
            ids, logp = torch.cat([ids, topk_ids], dim=1), torch.cat([logp, topk_logp], dim=1)
        ids, g, logp = (take_rows(x, rows) for x in (ids, g, logp))
        g_h = None if grad_entropy is None else take_rows(grad_entropy, rows)
        live = (g != 0).any(1)
        live = (live if g_h is None else live | (g_h != 0)) & (ids[:, 0] != -1)
        kept = live.nonzero().squeeze(1)
        if kept.shape[0] < lse.shape[0]:
            ids, lse, entropy, g, logp = (x[kept] for x in (ids, lse, entropy, g, logp))
            g_h = None if g_h is None else g_h[kept]
            rows = kept if rows is None else rows[kept]

        full = gather_sequence(hidden, shard.group) if plan.sequence_sharded else hidden.contiguous()
        live_hidden = take_rows(full, rows)
        weight_grad = WeightGrad(ctx.weight) if need_weight else None
        hidden_grad = (fused if plan.fused else chunked).backward(
            live_hidden,
            weight[: shard.valid],
            ids,
            logp,
            lse,
            entropy,
            g,
            g_h,
            start=shard.start,
            temperature=plan.temperature,
            weight_grad=weight_grad,
            need_hidden=need_hidden,
            vocab_chunk=plan.vocab_chunk,
        )
        d_hidden = None
        if hidden_grad is not None:
            # Partial sums of the ranks may cancel, so they meet in float32 and are rounded once.
            d_full = put_rows(hidden_grad, rows, total)
            reduce = reduce_sequence if plan.sequence_sharded else reduce_replicated
            d_hidden = reduce(d_full, shard.group).to(hidden.dtype)
        return d_hidden, None if weight_grad is None else weight_grad.result(), None, None, None, None


def topk_rows(topk_logp: Tensor, topk_ids: Tensor, absent_rows: Tensor) -> Tensor:
    """``topk_logp`` with 0 at rows without a token and ``-inf`` at absent ids."""
    return topk_logp.masked_fill(absent_rows[:, None], 0.0).masked_fill_(topk_ids == -1, -torch.inf)
