"""Sums over the job of what each rank measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from megatron_dppo.actor.objective import MicrobatchReport
from megatron_dppo.algorithm import TokenMetrics


def reduce_losses(
    reports: Sequence[MicrobatchReport], *, contributes: bool, device: torch.device
) -> tuple[float, TokenMetrics]:
    """Loss and token metrics of a mini-batch, the same on every rank.

    contributes: True on exactly one tensor-parallel rank of each last pipeline stage, whose reports are counted; the
    others add nothing, so one SUM and one MAX over the whole job are exact whatever the layout.
    """
    metrics = TokenMetrics.empty(device)
    loss = torch.zeros(1, dtype=torch.float64, device=device)
    if contributes:
        for report in reports:
            metrics = metrics.merge(report.metrics)
            loss += report.loss
    sums = torch.cat([loss, metrics.sums])
    maxima = metrics.maxima.clone()
    dist.all_reduce(sums)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
    return float(sums[0]), TokenMetrics(sums[1:], maxima)


def reduce_masked(
    reports: Sequence[MicrobatchReport], *, contributes: bool, vocab_size: int, device: torch.device
) -> torch.Tensor:
    """Blocked tokens of a mini-batch by id, int64 `[2, V]`, the same on every rank; `contributes` as above."""
    counts = torch.zeros(2, vocab_size, dtype=torch.int64, device=device)
    if contributes:
        for report in reports:
            assert report.masked is not None
            counts += report.masked
    dist.all_reduce(counts)
    return counts


def gather_rows(parts: Sequence[torch.Tensor], limit: int, columns: int) -> np.ndarray:
    """The first `limit` rows of each rank's `parts` (`[n, columns]` each, none on ranks that hold none), rank after
    rank, float32. Collective over the job."""
    mine = torch.cat(list(parts))[:limit].float().cpu().numpy() if parts else np.zeros((0, columns), dtype=np.float32)
    everybody: list[np.ndarray] = [mine] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    return np.concatenate(everybody)


def reduce_bytes(pulled: int, device: torch.device) -> dict[str, float]:
    """Bytes of rollout data that came to a rank in this step: mean and maximum over the job."""
    mean, most = (torch.tensor([pulled], dtype=torch.float64, device=device) for _ in range(2))
    dist.all_reduce(mean)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return {
        "data/pulled_bytes_mean": float(mean) / dist.get_world_size(),
        "data/pulled_bytes_max": float(most),
    }
