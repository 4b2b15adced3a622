"""Sums over the job of what each rank measured."""

from __future__ import annotations

from collections.abc import Sequence

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
