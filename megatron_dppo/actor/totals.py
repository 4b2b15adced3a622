"""Sums over the gradient steps of one rollout step."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_dppo.actor.optimizer import StepOutcome
from megatron_dppo.actor.packing import PackPlan
from megatron_dppo.router_replay.accounting import ReplayAccount


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
        """Means over the gradient steps, and totals."""
        steps = len(self.losses)
        norms = [o.grad_norm for o in self.outcomes if o.applied]
        result = {
            "optimizer/loss": sum(self.losses) / steps,
            "optimizer/grad_norm": sum(norms) / len(norms) if norms else float("nan"),
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
