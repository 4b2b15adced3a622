"""Local statistics and gradients by vocabulary chunk in plain PyTorch: any device, any floating type."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from megatron_dppo.vocab_parallel.matmul import accumulation_dtype, add_product, product
from megatron_dppo.vocab_parallel.rows import check_ids
from megatron_dppo.vocab_parallel.stats import Partials, concatenate, merge_two
from megatron_dppo.vocab_parallel.weight_grad import WeightGrad

# Logits alive at once, where the caller sets no chunk: 128 MB in float32.
_CHUNK_ELEMENTS = 1 << 25
_TOKEN_CHUNK = 4096


def forward(
    hidden: Float[Tensor, "N H"],
    weight: Float[Tensor, "V H"],
    wanted: Int[Tensor, "N I"],
    *,
    start: int,
    vocab_size: int,
    temperature: float,
    token_chunk: int | None = None,
    vocab_chunk: int | None = None,
) -> Partials:
    """Statistics of the columns ``[start, start + V)``, whose weights are ``weight``.

    Peak memory: a few ``[token_chunk, vocab_chunk]`` tensors in the accumulation type. Raises ``ValueError`` for ids
    outside ``[-1, vocab_size)``.
    """
    check_ids(wanted, vocab_size)
    rows = token_chunk or _TOKEN_CHUNK
    columns = vocab_chunk or max(1024, _CHUNK_ELEMENTS // max(1, min(rows, hidden.shape[0])))
    dtype = accumulation_dtype(hidden.dtype)
    blocks = []
    for t in range(0, max(1, hidden.shape[0]), rows):
        h, ids = hidden[t : t + rows], wanted[t : t + rows]
        total = local_partials_of_logits(h.new_empty((h.shape[0], 0), dtype=dtype), ids, start)
        for j in range(0, weight.shape[0], columns):
            z = product(h, weight[j : j + columns].t()) / temperature
            total = merge_two(total, local_partials_of_logits(z, ids, start + j))
        blocks.append(total)
    return concatenate(blocks)


def backward(
    hidden: Float[Tensor, "N H"],
    weight: Float[Tensor, "V H"],
    ids: Int[Tensor, "N I"],
    logp: Float[Tensor, "N I"],
    lse: Float[Tensor, " N"],
    entropy: Float[Tensor, " N"],
    grad_logp: Float[Tensor, "N I"],
    grad_entropy: Float[Tensor, " N"] | None,
    *,
    start: int,
    temperature: float,
    weight_grad: WeightGrad | None,
    need_hidden: bool,
    vocab_chunk: int | None = None,
) -> Float[Tensor, "N H"] | None:
    """This shard's part of the gradients: the weight's go to ``weight_grad``, the hidden's come back, unrounded.

    With ``p_j = exp(z_j - lse)``, ``g_i = dL/dlogp_i`` of each row's global ids, absent ones (``-1``) 0, and ``g_H =
    dL/dentropy``::

        dL/dz_j = sum_i g_i 1[j = i] - (sum_i g_i) p_j - g_H p_j (ln p_j + entropy)

    The second sum is over all ids, also those of other shards. ``logp`` is not read here. Logits are recomputed by
    vocabulary chunk over all rows, so a chunk of dW is written once.
    """
    columns = vocab_chunk or max(1024, _CHUNK_ELEMENTS // max(1, hidden.shape[0]))
    hidden_grad = torch.zeros_like(hidden, dtype=accumulation_dtype(hidden.dtype)) if need_hidden else None
    total = grad_logp.sum(1, keepdim=True)
    for j in range(0, weight.shape[0], columns):
        chunk = weight[j : j + columns]
        log_p = product(hidden, chunk.t()).div_(temperature).sub_(lse[:, None])
        scale = total
        if grad_entropy is not None:
            scale = scale + grad_entropy[:, None] * (log_p + entropy[:, None])
        dz = log_p.exp_().mul_(scale).neg_()
        column = ids - (start + j)
        own = ((column >= 0) & (column < chunk.shape[0])).to(dz.dtype)
        dz.scatter_add_(1, column.clamp(0, chunk.shape[0] - 1), grad_logp * own)
        dz = dz.div_(temperature)
        # Half-precision tensor cores take half-precision factors; a CPU computes in float32 anyway.
        if dz.is_cuda:
            dz = dz.to(hidden.dtype)
        if hidden_grad is not None:
            add_product(hidden_grad, dz, chunk)
        if weight_grad is not None:
            weight_grad.add(j, j + chunk.shape[0], dz, hidden)
    return hidden_grad


def local_partials_of_logits(z: Float[Tensor, "T C"], wanted: Int[Tensor, "T I"], first_column: int) -> Partials:
    """Statistics of the columns ``[first_column, first_column + C)``, which are ``z``."""
    if z.shape[1] == 0:
        zero = z.sum(1)  # 0, and part of the graph: a rank whose shard is all padding has a gradient too, zeros
        m = zero.detach() - torch.inf
        return Partials(m, zero, zero, z.new_full(wanted.shape, -torch.inf))
    m = z.detach().amax(1)
    shifted = z - m[:, None]
    exp = shifted.exp()
    column = wanted - first_column
    inside = (column >= 0) & (column < z.shape[1])
    picked = z.gather(1, column.clamp(0, z.shape[1] - 1)).masked_fill(~inside, -torch.inf)
    return Partials(m, exp.sum(1), (shifted * exp).sum(1), picked)
