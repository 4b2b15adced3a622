"""The readable reference: statistics of local logits by plain differentiable PyTorch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_dppo.vocab_parallel import TokenStats, VocabShard
from megatron_dppo.vocab_parallel.chunked import local_partials_of_logits
from megatron_dppo.vocab_parallel.op import topk_rows
from megatron_dppo.vocab_parallel.rows import check_ids
from megatron_dppo.vocab_parallel.stats import Partials, finish, merge


def token_stats_from_logits(
    logits_local: Float[Tensor, "T V_local"],
    token_ids: Int[Tensor, " T"],
    topk_ids: Int[Tensor, "T K"] | None = None,
    *,
    shard: VocabShard,
    temperature: float = 1.0,
) -> TokenStats:
    """Log-probability, entropy and top-K log-probabilities from this rank's logits.

    With ``z = logits / temperature`` over the columns below ``shard.vocab_size``::

        log pi(i) = z_i - ln sum_j exp z_j          entropy = -sum_j p_j ln p_j

    Shapes: ``logits_local [T, V_local]`` with ``V_local = shard.stop - shard.start``; ids are global; results are
    replicated over ``shard.group``. Below float64 everything is computed in float32. Collectives: one all-gather of
    ``[3 + 1 + K, T]``. Gradients flow from all three to ``logits_local``; every rank must back-propagate the same
    gradients. Memory is that of several ``[T, V_local]`` tensors: this is what
    :func:`token_stats` is tested against, not what trains.
    """
    if logits_local.shape[1] != shard.stop - shard.start:
        raise ValueError(
            f"logits_local has {logits_local.shape[1]} columns, the shard [{shard.start}, {shard.stop}) has "
            f"{shard.stop - shard.start}"
        )
    z = logits_local.to(torch.promote_types(logits_local.dtype, torch.float32)) / temperature
    z = z[:, : shard.valid]
    wanted = token_ids[:, None] if topk_ids is None else torch.cat([token_ids[:, None], topk_ids], dim=1)
    check_ids(wanted, shard.vocab_size)
    total = local_partials_of_logits(z, wanted, shard.start)
    if shard.world_size > 1:
        total = merge(Partials.unpack(GatherForMerge.apply(total.pack(), shard.group)))
    _, row_entropy, logp = finish(total)
    absent = token_ids == -1
    return TokenStats(
        logp=logp[:, 0].masked_fill(absent, 0.0),
        entropy=row_entropy.masked_fill(absent, 0.0),
        topk_logp=None if topk_ids is None else topk_rows(logp[:, 1:], topk_ids, absent),
    )


class GatherForMerge(torch.autograd.Function):
    """All-gather whose backward keeps this rank's slice.

    Right where every rank computes the same value from the gathered tensor and back-propagates the same gradient:
    the true gradient of the local slice is then that slice alone, not its sum over ranks.
    """

    @staticmethod
    def forward(ctx, packed: Tensor, group: ProcessGroup) -> Tensor:
        ctx.rank = group.rank()
        gathered = packed.new_empty((group.size(), *packed.shape))
        dist.all_gather_into_tensor(gathered.flatten(0, 1), packed.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad[ctx.rank].contiguous(), None
