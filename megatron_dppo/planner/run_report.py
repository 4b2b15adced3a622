"""The plan of a run's configuration, for a person and for a program."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from megatron_dppo.planner.fix import Fix
from megatron_dppo.planner.gpus import GIB
from megatron_dppo.planner.plan import Plan
from megatron_dppo.planner.report import plan_json, print_extrapolated, print_plan


def print_run(console: Console, plan: Plan, fix: Fix | None, beside: tuple[str, ...]) -> None:
    print_plan(console, plan)
    print_extrapolated(console, plan)
    if beside:
        console.print("[yellow]Beside these figures:[/]")
        for line in beside:
            console.print(f"- {line}", highlight=False, markup=False)
    if not plan.problem:
        verdict = "[green]It fits[/]" if plan.comfortable else "[yellow]It fits, but barely[/]"
        console.print(f"{verdict}: training and weight sync take {plan.share:.0%} of a card", highlight=False)
        return
    console.print(f"[red]It does not fit[/]: {plan.problem}", highlight=False)
    console.print(advice(plan, fix), highlight=False, markup=False)


def advice(plan: Plan, fix: Fix | None) -> str:
    """What to change, and what that leads to."""
    if fix is None:
        return f"No change that was tried makes it fit on {plan.gpus} GPUs or on eight times as many ranks"
    most = max(fix.plan.cards.values()) / GIB
    return (
        f"Cheapest change: {fix}: at most {most:.0f} GiB of {plan.layout.gpu.memory / GIB:.0f} on a card, a step of "
        f"{fix.plan.step_s:.0f} s (now {plan.step_s:.0f})"
    )


def run_json(plan: Plan, fix: Fix | None, beside: tuple[str, ...]) -> dict[str, Any]:
    return {
        "fits": not plan.problem,
        "plan": plan_json(plan),
        "beside": list(beside),
        "fix": None
        if fix is None
        else {"overrides": list(fix.keys), "gpus": fix.plan.gpus, "moments": fix.plan.cards, "step": fix.plan.step_s},
    }
