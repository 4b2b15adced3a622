"""Sums over the job of what each rank measured, and over the gradient steps of one rollout step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from megatron_dppo.actor.objective import MicrobatchReport
from megatron_dppo.actor.optimizer import StepOutcome
from megatron_dppo.actor.packing import PackPlan
from megatron_dppo.algorithm import TokenMetrics
from megatron_dppo.router_replay.accounting import ReplayAccount


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


class BlockedTokens:
    """Collects what the trust region blocked in the mini-batches and epochs of an update."""

    def __init__(self, watch: torch.Tensor, vocab_size: int, *, contributes: bool) -> None:
        """`watch` is bool `[B]`, the sequences whose rows are reported one by one; `contributes` as above."""
        self.watch, self.vocab_size, self._contributes = watch, vocab_size, contributes
        self._counts = torch.zeros(2, vocab_size, dtype=torch.int64, device=watch.device)
        self._rows: list[torch.Tensor] = []

    def add(self, reports: Sequence[MicrobatchReport]) -> None:
        if self._contributes:
            for report in reports:
                assert report.blocked is not None
                self._counts += report.blocked.counts
                self._rows.append(report.blocked.rows)

    def reduce(self) -> tuple[torch.Tensor, np.ndarray]:
        """`UpdateReport.masked_counts` and `watched`. Collective over the job: a sum and a gather."""
        dist.all_reduce(self._counts)
        mine = np.concatenate([np.zeros((0, 3), dtype=np.int64), *(rows.cpu().numpy() for rows in self._rows)])
        found = _gather(mine)
        found = found[np.lexsort((1 - found[:, 2], found[:, 1], found[:, 0]))]  # blocked ones first
        first = np.ones(len(found), dtype=bool)
        first[1:] = (found[1:, :2] != found[:-1, :2]).any(axis=1)
        return self._counts, found[first]


def gather_rows(parts: Sequence[torch.Tensor], limit: int, columns: int) -> np.ndarray:
    """The first `limit` rows of each rank's `parts` (`[n, columns]` each, none on ranks that hold none), rank after
    rank, float32. Collective over the job."""
    mine = torch.cat(list(parts))[:limit].float().cpu().numpy() if parts else np.zeros((0, columns), dtype=np.float32)
    return _gather(mine)


def _gather(mine: np.ndarray) -> np.ndarray:
    """The rows of all ranks, rank after rank."""
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


@dataclass
class StepTotals:
    """Collects what the gradient steps report; `metrics` names it."""

    losses: list[float] = field(default_factory=list)
    outcomes: list[StepOutcome] = field(default_factory=list)
    replay: ReplayAccount | None = None
    rows: int = 0
    padding: int = 0
    imbalance: float = 1.0

    def add_step(self, loss: float, outcome: StepOutcome) -> None:
        self.losses.append(loss)
        self.outcomes.append(outcome)

    def add_replay(self, account: ReplayAccount) -> None:
        self.replay = account if self.replay is None else self.replay + account

    def add_plan(self, plan: PackPlan) -> None:
        self.rows += plan.padded_rows
        self.padding += plan.padded_rows - plan.real_rows
        self.imbalance = max(self.imbalance, plan.imbalance)

    def metrics(self) -> dict[str, float]:
        """Means over the gradient steps, the largest norm, and totals."""
        steps = len(self.losses)
        norms = [o.grad_norm for o in self.outcomes if o.applied]
        result = {
            "optimizer/loss": sum(self.losses) / steps,
            "optimizer/grad_norm": sum(norms) / len(norms) if norms else float("nan"),
            "optimizer/grad_norm_max": max(norms, default=float("nan")),
            "optimizer/lr": self.outcomes[-1].lr,
            "optimizer/skipped_steps": float(steps - len(norms)),
            "optimizer/overflowed_steps": float(sum(o.overflowed for o in self.outcomes)),
            "optimizer/loss_scale": self.outcomes[-1].loss_scale,
            "data/trained_tokens": float(self.rows - self.padding),
            "data/padding_fraction": self.padding / max(self.rows, 1),
            "data/rank_imbalance": self.imbalance,
        }
        if self.replay is not None:
            result |= self.replay.metrics()
        return result
