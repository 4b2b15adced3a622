"""Sums over the gradient steps of one rollout step."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_dppo.actor.optimizer import StepOutcome
from megatron_dppo.actor.packing import PackPlan
from megatron_dppo.router_replay.replay import ReplayCounts


@dataclass
class StepTotals:
    """Collects what the gradient steps report; `metrics` names it."""

    losses: list[float] = field(default_factory=list)
    outcomes: list[StepOutcome] = field(default_factory=list)
    replayed: int = 0
    gaps: int = 0
    differing: int = 0
    rows: int = 0
    padding: int = 0
    imbalance: float = 1.0

    def add_step(self, loss: float, outcome: StepOutcome) -> None:
        self.losses.append(loss)
        self.outcomes.append(outcome)

    def add_replay(self, counts: ReplayCounts) -> None:
        self.replayed += counts.replayed
        self.gaps += counts.gaps
        self.differing += counts.differing

    def add_plan(self, plan: PackPlan) -> None:
        self.rows += plan.padded_rows
        self.padding += plan.padded_rows - plan.real_rows
        self.imbalance = max(self.imbalance, plan.imbalance)

    def metrics(self, replay: bool) -> dict[str, float]:
        """Means over the gradient steps, and totals."""
        steps = len(self.losses)
        norms = [o.grad_norm for o in self.outcomes if o.applied]
        result = {
            "optimizer/loss": sum(self.losses) / steps,
            "optimizer/grad_norm": sum(norms) / len(norms) if norms else float("nan"),
            "optimizer/lr": self.outcomes[-1].lr,
            "optimizer/skipped_steps": float(steps - len(norms)),
            "data/padding_fraction": self.padding / max(self.rows, 1),
            "data/rank_imbalance": self.imbalance,
        }
        if replay:
            result |= {
                "r3/replayed_routings": float(self.replayed),
                "r3/gap_routings": float(self.gaps),
                "r3/differing_fraction": self.differing / max(self.replayed, 1),
            }
        return result
