"""Gradients summed over data-parallel ranks with half of the bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup, shard_buffer
from torch import Tensor

_PIECE = 1 << 26
"""Numbers that are sent at a time where nothing runs beside: 128 MiB of bfloat16 as sent, and as received."""

_LARGEST = 1 << 28
"""Numbers of a bucket that may be under way at once: 512 MiB as sent, and as received."""


def reduce_in_bfloat16(chunks: Iterable[Any]) -> None:
    """From now on the gradients of these DistributedDataParallel chunks, which are added up over microbatches in
    float32 as ever, cross ranks in bfloat16 (`Bfloat16BucketGroup`). To be called before the first backward."""
    for chunk in chunks:
        for groups in (chunk.bucket_groups, chunk.expert_parallel_bucket_groups):
            for number, group in enumerate(groups):
                group.__class__ = Bfloat16BucketGroup
                if number and chunk.ddp_config.overlap_grad_reduce:
                    # Whose copies are let go of before this one's are made.
                    group.previous_grad_reduce_bucket_group = groups[number - 1]


class Bfloat16BucketGroup(_ParamAndGradBucketGroup):
    """Buckets of float32 gradients whose reduce-scatter sends bfloat16.

    `shard_r = sum over ranks q of bfloat16(g_q)[shard r]`, added in float32 and not rounded again: every rank rounds
    its part once, a relative error of 2^-9 a number at most. Megatron-Core's own switches round the sum as well, and
    add up over microbatches in bfloat16 or in a second buffer. One all-to-all of 2 bytes a number, in place of a
    reduce-scatter of 4.
    """

    grad_reduce_handle: Any
    previous_grad_reduce_bucket_group: Any

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        if self.intra_distributed_optimizer_instance_size == 1 or force_all_reduce:
            super().start_grad_sync(force_all_reduce=force_all_reduce)
            return
        if self.is_first_batch and self.grad_reduce_handle is not None:
            return
        before = self.previous_grad_reduce_bucket_group
        if before is not None and before.grad_reduce_handle is not None:
            before.finish_grad_sync()
        assert self.grad_reduce_handle is None, "one reduction at a time"
        overlap = self.ddp_config.overlap_grad_reduce
        # Later pipeline stages and model chunks have one bucket of all their gradients: that goes piece by piece.
        beside = overlap and sum(bucket.grad_data.numel() for bucket in self.buckets) <= _LARGEST
        sums = [one for bucket in self.buckets for one in self._exchange(bucket, beside=beside)]
        self.grad_reduce_handle = _Exchanges(sums) if overlap else None

    @torch.no_grad()
    def _exchange(self, bucket: Any, *, beside: bool) -> list[_Exchange]:
        """What is under way of a bucket; nothing where the backward does not go on meanwhile."""
        size, group = self.intra_distributed_optimizer_instance_size, self.intra_distributed_optimizer_instance_group
        if bucket.gradient_scaling_factor != 1.0:
            bucket.grad_data *= bucket.gradient_scaling_factor
        mine = shard_buffer(bucket.grad_data, size)[self.intra_distributed_optimizer_instance_rank]
        shards = bucket.grad_data.view(size, -1)
        step = mine.numel() if beside else max(1, _PIECE // size)
        under_way = []
        for start in range(0, mine.numel(), step):
            sent = shards[:, start : start + step].to(torch.bfloat16, memory_format=torch.contiguous_format)
            received = torch.empty_like(sent)
            work = dist.all_to_all_single(received, sent, group=group, async_op=beside)
            exchange = _Exchange(work, sent, received, mine[start : start + step])
            if beside:
                under_way.append(exchange)
            else:
                exchange.finish()
        return under_way


@dataclass
class _Exchange:
    work: Any
    sent: Tensor
    """Kept until it is sent."""
    received: Tensor
    """`[ranks, n]`"""
    total: Tensor

    @torch.no_grad()
    def finish(self) -> None:
        if self.work is not None:
            self.work.wait()
        torch.sum(self.received, dim=0, dtype=torch.float32, out=self.total)


@dataclass
class _Exchanges:
    """As the handle of a collective."""

    under_way: list[_Exchange]

    def wait(self) -> None:
        for exchange in self.under_way:
            exchange.finish()
