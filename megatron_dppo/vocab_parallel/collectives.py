"""The op's collectives over the tensor-parallel group. Each is a no-op without a group of two or more ranks.

None of them is differentiable by itself: the op's backward calls the transposed one.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_dppo.vocab_parallel.stats import Partials, merge


def _alone(group: ProcessGroup | None) -> bool:
    return group is None or group.size() == 1


def merge_over_ranks(local: Partials, group: ProcessGroup | None) -> Partials:
    """Statistics of the whole vocabulary from each rank's: one all-gather, merged in rank order.

    Every rank folds the same numbers in the same order, so the result is the same to the bit everywhere.
    """
    if _alone(group):
        return local
    assert group is not None
    packed = local.pack()
    gathered = packed.new_empty((group.size(), *packed.shape))
    dist.all_gather_into_tensor(gathered.flatten(0, 1), packed, group=group)
    return merge(Partials.unpack(gathered))


def gather_sequence(shard: Tensor, group: ProcessGroup | None) -> Tensor:
    """``[T / ranks, H]`` of each rank to ``[T, H]`` in rank order."""
    if _alone(group):
        return shard
    assert group is not None
    full = shard.new_empty((shard.shape[0] * group.size(), *shard.shape[1:]))
    dist.all_gather_into_tensor(full, shard.contiguous(), group=group)
    return full


def reduce_sequence(partial: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum ``[T, H]`` over ranks and keep this rank's ``[T / ranks, H]``."""
    if _alone(group):
        return partial
    assert group is not None
    own = partial.new_empty((partial.shape[0] // group.size(), *partial.shape[1:]))
    dist.reduce_scatter_tensor(own, partial.contiguous(), group=group)
    return own


def reduce_replicated(partial: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum ``[T, H]`` over ranks, in place."""
    if not _alone(group):
        dist.all_reduce(partial, group=group)
    return partial
