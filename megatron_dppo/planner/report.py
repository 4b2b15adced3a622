"""A search's result, or the plan of a run's configuration, as tables for a person and as JSON for a program."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_dppo.models.parallel import ParallelConfig
from megatron_dppo.planner.engine import ENGINE_SIZES, UTILIZATION, WORKSPACE
from megatron_dppo.planner.fix import Fix
from megatron_dppo.planner.gpus import GIB
from megatron_dppo.planner.memory import StageMemory
from megatron_dppo.planner.parameters import active_per_token, stage_adapters, whole_model
from megatron_dppo.planner.plan import Plan
from megatron_dppo.planner.search import SearchResult
from megatron_dppo.planner.workload import Layout

_SHOWN = 6


def layout_name(parallel: ParallelConfig) -> str:
    """`TP2 PP4 EP8`: what is not 1; "1 rank" where all is."""
    sizes = {
        "TP": parallel.tensor,
        "PP": parallel.pipeline,
        "VPP": parallel.chunks,
        "CP": parallel.context,
        "EP": parallel.expert,
        "ETP": parallel.expert_tensor,
    }
    return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "data parallel only"


def memory_parts(stage: StageMemory) -> dict[str, int]:
    """Bytes by part; they add up to the peak that torch's allocator reports."""
    return {
        "weights": stage.weights,
        **({"adapters": stage.adapter_weights} if stage.adapters is not None else {}),
        "gradients": stage.gradients,
        "optimizer": stage.optimizer,
        "activations": stage.activations,
        "workspace": max(stage.workspace, stage.head_workspace),
        "library workspaces": stage.constant,
    }


def print_report(console: Console, result: SearchResult, config: str | None) -> None:
    best = result.best
    if best is None:
        _print_nothing(console, result)
        return
    print_plan(console, best)
    if len(result.fitting) > 1:
        console.print(_alternatives(result.fitting[:_SHOWN], f"Fastest of {len(result.fitting)} layouts that fit"))
    if result.others:
        console.print(_refused(result.others))
    print_extrapolated(console, best)
    console.print("\nThe configuration to run it:\n")
    print(config)


def print_plan(console: Console, plan: Plan) -> None:
    """Memory, time, bytes and engines of one plan."""
    _head(console, plan)
    console.print(_memory_table(plan), _time_table(plan), _traffic_table(plan))
    console.print(_engine_line(plan), highlight=False)
    console.print(_moments_line(plan), highlight=False)


def print_extrapolated(console: Console, plan: Plan) -> None:
    if plan.extrapolated:
        console.print(f"[yellow]Extrapolated[/] beyond what was measured: {'; '.join(plan.extrapolated)}")


def _print_nothing(console: Console, result: SearchResult) -> None:
    """Why no layout fits: the one that comes nearest, with its memory."""
    nearest = result.others[0]
    _head(console, nearest)
    console.print(_memory_table(nearest), _refused(result.others))
    console.print(f"[red]Nothing fits.[/] {_advice(nearest)}", highlight=False)


def _advice(plan: Plan) -> str:
    engine, memory = plan.engine, plan.layout.gpu.memory
    if engine.tensor == ENGINE_SIZES[-1] and engine.weights + WORKSPACE > UTILIZATION * memory:
        return (
            f"An engine lives in one node, and each of its {engine.tensor} GPUs would hold {engine.weights / GIB:.0f} "
            f"GiB of weights, of {memory / GIB:.0f}, so more GPUs do not help: take larger ones, or halve the weights "
            "(--config with rollout.quantization=fp8)."
        )
    return "Use more GPUs, shorter sequences (--sequence), or --rollout-gpus."


def _head(console: Console, plan: Plan) -> None:
    model, layout = plan.layout.model, plan.layout
    total, active = whole_model(model).total, active_per_token(model)
    console.print(
        f"{model.family.model_type}: {total / 1e9:.2f} B parameters, {active / 1e9:.2f} B active per token beside the "
        f"vocabulary; {_adapters(plan)}{plan.gpus} x {layout.gpu.name}"
        + (f", {plan.rollout_gpus} of them for engines only" if plan.rollout_gpus else ", shared with the engines"),
        highlight=False,
    )
    console.print(
        f"[bold]{layout_name(layout.parallel)}[/], data parallel {layout.data}, recompute {_recompute(layout)}, "
        f"{plan.microbatches} microbatches of {layout.microbatch_tokens} tokens per rank and gradient step",
        highlight=False,
    )


def _recompute(layout: Layout) -> str:
    first = f", {layout.recompute_layers} layers of each chunk" if layout.recompute_layers else ""
    return f"{layout.recompute}{first}"


def _adapters(plan: Plan) -> str:
    """The whole model's, in words."""
    model, lora = plan.layout.model, plan.layout.lora
    if lora is None:
        return ""
    trained = stage_adapters(model, ParallelConfig(), 0, lora).total
    return f"{trained / 1e9:.3f} B trained in adapters of rank {lora.rank} on {', '.join(lora.targets)}; "


def _table(title: str, *columns: str, words: int = 1) -> Table:
    """The first `words` columns are words, the others numbers."""
    table = Table(title=title)
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number < words else "right")
    return table


def _memory_table(plan: Plan) -> Table:
    shown = {stage.stage: stage for stage in (plan.stages[0], plan.fullest, plan.stages[-1])}
    stages = [shown[number] for number in sorted(shown)]
    names = [f"stage {stage.stage}" if len(plan.stages) > 1 else "every rank" for stage in stages]
    table = _table("Memory of a rank while training, GiB", "part", *names)
    columns = [memory_parts(stage) for stage in stages]
    for part in columns[0]:
        table.add_row(part, *(f"{column[part] / GIB:.2f}" for column in columns))
    table.add_row("[bold]peak of the allocator[/]", *(f"[bold]{stage.peak / GIB:.1f}[/]" for stage in stages))
    table.add_row("on the GPU", *(f"{stage.on_gpu / GIB:.1f}" for stage in stages))
    table.add_row("fullest in", *(stage.moment for stage in stages))
    return table


def _time_table(plan: Plan) -> Table:
    table = _table("Time of a rollout step", "phase", "seconds", "share")
    for name, seconds in (("rollout", plan.rollout_s), ("training", plan.train_s), ("weight sync", plan.sync_s)):
        table.add_row(name, f"{seconds:.1f}", f"{seconds / plan.step_s:.0%}")
    table.add_row("[bold]all[/]", f"[bold]{plan.step_s:.1f}[/]", f"{plan.tokens_per_second:,.0f} tokens/s")
    step = plan.gradient_step
    table.add_section()
    for name, seconds in vars(step).items():
        table.add_row(f"gradient step: {name}", f"{seconds:.2f}", f"{seconds / step.total:.0%}")
    rate = f"{plan.training_tokens_per_second:,.0f} tokens/s"
    workload = plan.workload
    passes = f" ({workload.ppo_epochs} passes of {workload.mini_batches})" if workload.ppo_epochs > 1 else ""
    table.add_row(f"{workload.gradient_steps} gradient steps{passes}", f"{plan.train_s:.1f}", rate)
    return table


def _traffic_table(plan: Plan) -> Table:
    table = _table("Bytes of a rollout step, GiB", "what", "GiB")
    for name, size in vars(plan.traffic).items():
        table.add_row(name.replace("_", " "), f"{size / GIB:.2f}")
    table.add_row("[bold]held on hosts[/] (routes, log-probabilities, tokens)", f"{plan.traffic.rollouts / GIB:.2f}")
    return table


def _engine_line(plan: Plan) -> str:
    engine = plan.engine
    return (
        f"Engines: {engine.engines} of {engine.tensor} GPU{'s' if engine.tensor > 1 else ''}; per GPU "
        f"{engine.weights / GIB:.1f} GiB of weights and {engine.kv_cache / GIB:.1f} GiB of KV cache "
        f"({engine.kv_per_token / 1024:.0f} KiB a token), {engine.concurrent} sequences of full length at once; "
        f"{engine.decode_tokens_per_second:,.0f} tokens/s in all"
    )


def _moments_line(plan: Plan) -> str:
    """The GPU moment by moment, and the node's page-locked memory."""
    moments = ", ".join(f"{moment} {size / GIB:.1f}" for moment, size in plan.moments.items())
    return (
        f"GiB of the {plan.layout.gpu.memory / GIB:.1f} on the fullest GPU: {moments}; page-locked on a training node "
        f"{plan.host_per_node / GIB:.1f} GiB"
    )


def _alternatives(plans: tuple[Plan, ...], title: str) -> Table:
    names = ("layout", "recompute", "on the GPU, GiB", "training s", "step s", "tokens/s")
    table = _table(title, *names, words=2)
    for plan in plans:
        table.add_row(
            layout_name(plan.layout.parallel),
            _recompute(plan.layout),
            f"{plan.on_gpu / GIB:.0f}",
            f"{plan.train_s:.0f}",
            f"{plan.step_s:.0f}",
            f"{plan.tokens_per_second:,.0f}",
        )
    return table


def _refused(plans: tuple[Plan, ...]) -> Table:
    table = _table(f"Layouts that do not fit: {len(plans)} (the nearest first)", "layout", "reason", words=2)
    for plan in plans[:_SHOWN]:
        table.add_row(layout_name(plan.layout.parallel), plan.problem)
    left = Counter("memory" if plan.problem.startswith("needs") else "other" for plan in plans[_SHOWN:])
    if left:
        table.add_row(f"{sum(left.values())} more", ", ".join(f"{count} for {why}" for why, count in left.items()))
    return table


def plan_json(plan: Plan) -> dict[str, Any]:
    """Everything of a plan in plain units: bytes, seconds."""
    layout = plan.layout
    return {
        "parallel": layout.parallel.model_dump(),
        "data_parallel": layout.data,
        "gpus": plan.gpus,
        "rollout_gpus": plan.rollout_gpus,
        "gpu": layout.gpu.name,
        "recompute": layout.recompute,
        "recompute_layers": layout.recompute_layers,
        "microbatch_tokens": layout.microbatch_tokens,
        "microbatches": plan.microbatches,
        "ppo_epochs": plan.workload.ppo_epochs,
        "gradient_steps": plan.workload.gradient_steps,
        "lora": layout.lora.model_dump(mode="json") if layout.lora else None,
        "problem": plan.problem,
        "extrapolated": list(plan.extrapolated),
        "memory": {
            "on_gpu": plan.on_gpu,
            "available": layout.gpu.memory,
            "moments": plan.moments,
            "host_per_node": plan.host_per_node,
            "stages": [
                {
                    "stage": stage.stage,
                    "parameters": vars(stage.parameters) | {"total": stage.parameters.total},
                    "trained_parameters": stage.trained.total,
                    "parts": memory_parts(stage),
                    "peak": stage.peak,
                    "moment": stage.moment,
                }
                for stage in plan.stages
            ],
        },
        "seconds": {
            "rollout": plan.rollout_s,
            "training": plan.train_s,
            "weight_sync": plan.sync_s,
            "step": plan.step_s,
            "gradient_step": vars(plan.gradient_step) | {"total": plan.gradient_step.total},
        },
        "tokens_per_second": {"training": plan.training_tokens_per_second, "step": plan.tokens_per_second},
        "engine": vars(plan.engine),
        "traffic": vars(plan.traffic),
    }


def result_json(result: SearchResult, config: str | None) -> dict[str, Any]:
    return {
        "best": plan_json(result.best) if result.best else None,
        "fitting": [plan_json(plan) for plan in result.fitting[:_SHOWN]],
        "not_fitting": [
            {"parallel": plan.layout.parallel.model_dump(), "problem": plan.problem} for plan in result.others
        ],
        "impossible": [{"parallel": parallel.model_dump(), "problem": why} for parallel, why in result.impossible],
        "config": config,
    }


def print_run(console: Console, plan: Plan, fix: Fix | None, beside: tuple[str, ...]) -> None:
    print_plan(console, plan)
    print_extrapolated(console, plan)
    if beside:
        console.print("[yellow]Beside these figures:[/]")
        for line in beside:
            console.print(f"- {line}", highlight=False, markup=False)
    if not plan.problem:
        verdict = "[green]It fits[/]" if plan.comfortable else "[yellow]It fits, but barely[/]"
        console.print(f"{verdict}: training and weight sync take {plan.share:.0%} of a GPU", highlight=False)
        return
    console.print(f"[red]It does not fit[/]: {plan.problem}", highlight=False)
    console.print(advice(plan, fix), highlight=False, markup=False)


def advice(plan: Plan, fix: Fix | None) -> str:
    """What to change, and what that leads to."""
    if fix is None:
        return f"No change that was tried makes it fit on {plan.gpus} GPUs or on eight times as many ranks"
    most = max(fix.plan.moments.values()) / GIB
    return (
        f"Cheapest change: {fix}: at most {most:.0f} GiB of {plan.layout.gpu.memory / GIB:.0f} on a GPU, a step of "
        f"{fix.plan.step_s:.0f} s (now {plan.step_s:.0f})"
    )


def run_json(plan: Plan, fix: Fix | None, beside: tuple[str, ...]) -> dict[str, Any]:
    return {
        "fits": not plan.problem,
        "plan": plan_json(plan),
        "beside": list(beside),
        "fix": None
        if fix is None
        else {"overrides": list(fix.keys), "gpus": fix.plan.gpus, "moments": fix.plan.moments, "step": fix.plan.step_s},
    }
