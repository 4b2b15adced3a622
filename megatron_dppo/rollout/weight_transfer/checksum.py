"""A few numbers that tell whether the bytes a worker loaded are those that their owner packed."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_dppo.checkpoint.weight_layout import BucketLayout, Segment

SAMPLE_BYTES = 1 << 18
"""Checked of each bucket."""


def sampled(index: int, layout: BucketLayout) -> Segment:
    """The bytes of bucket `index` that are checked: the beginning of one sender's share, another one in each bucket."""
    segment = layout.segments[index % len(layout.segments)]
    return Segment(segment.source, segment.start, min(segment.stop, segment.start + SAMPLE_BYTES))


def checksum(payload: torch.Tensor, part: Segment) -> torch.Tensor:
    """int64 scalar on the payload's device: the bytes' sum, each times one more than its place. No synchronisation."""
    values = payload[part.start : part.stop].long()
    return (values * torch.arange(1, len(values) + 1, device=values.device)).sum()


class Packed:
    """Checksums of what this rank packed for the sync under way."""

    def __init__(self) -> None:
        self._rank = dist.get_rank()
        self._sums: dict[int, torch.Tensor] = {}

    def note(self, index: int, layout: BucketLayout, payload: torch.Tensor) -> None:
        """Bucket `index` was packed; no synchronisation."""
        part = sampled(index, layout)
        if part.source == self._rank:
            self._sums[index] = checksum(payload, part)

    def collect(self) -> dict[int, int]:
        """Of every bucket, on every rank; forgets them. Collective."""
        found: list[dict[int, int]] = [{}] * dist.get_world_size()
        dist.all_gather_object(found, {index: int(value) for index, value in self._sums.items()})
        self._sums = {}
        return {index: value for sums in found for index, value in sums.items()}
