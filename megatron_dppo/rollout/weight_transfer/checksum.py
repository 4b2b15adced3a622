"""A few numbers that tell whether the bytes a worker loaded are those that their owner packed."""

from __future__ import annotations

import torch

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
