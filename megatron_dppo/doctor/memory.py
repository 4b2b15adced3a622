"""Whether the memory of a run fits the GPUs it is meant for, by the planner."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from megatron_dppo.config.schema import Config
from megatron_dppo.errors import UserError
from megatron_dppo.models.hf_config import HFConfig
from megatron_dppo.planner.fix import MORE_GPUS, find_fix
from megatron_dppo.planner.gpus import GIB, Gpu, gpu_of_device
from megatron_dppo.planner.plan import COMFORTABLE, Plan, memory_problem
from megatron_dppo.planner.report import memory_parts
from megatron_dppo.planner.run import Run, engine_gpus, planned_run
from megatron_dppo.preflight.finding import Finding, error, ok, warning
from megatron_dppo.preflight.rules import check_model


def gpu_here() -> Gpu | None:
    """The smallest GPU of this machine; None without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    smallest = min(devices, key=lambda device: device.total_memory)
    return gpu_of_device(smallest.name, smallest.total_memory)


def check_memory(config: Config, model: HFConfig, *, ranks: int | None, gpu: Gpu | None) -> Iterator[Finding]:
    """What the fullest rank needs of `gpu` on `ranks` ranks. Without them: on as many GPUs as this machine has, or on
    the fewest that layout and engines divide.

    Says nothing of a float32 run where no GPU is known, as on a CPU, nor of a layout that is impossible, which is
    another check's.
    """
    single = config.actor.dtype == "float32"
    if gpu is None:
        if not single:
            yield ok("memory", "not checked, there is no GPU here: name the one it is meant for with --gpu-kind")
        return
    if single:
        yield ok("memory", "not checked: the planner knows actor.dtype=bfloat16 and float16, not float32")
        return
    from torch.cuda import device_count

    engines = engine_gpus(config)
    fewest = math.lcm(config.parallel.fewest_ranks, 1 if engines else config.rollout.tensor_parallel)
    world = ranks or max(fewest, (device_count() - engines) // fewest * fewest)
    if {finding.check for finding in check_model(config, model, world)} & {"layout", "engines"}:
        return
    try:
        run = planned_run(config, model, gpu, world + engines)
    except UserError as problem:
        yield error("memory", str(problem), "see docs/rollouts.md")
        return
    yield _verdict(run, assumed=ranks is None)


def _verdict(run: Run, *, assumed: bool) -> Finding:
    plan, gpu = run.plan(), run.layout.gpu
    problem = memory_problem(plan)
    figure = f"{_figure(plan)} on {_counted(run.layout.gpus)} of {gpu.name}" + (" (see --ranks)" if assumed else "")
    enough = _enough_ranks(run) if problem and assumed else None
    if enough is not None:
        return warning("memory", f"{figure}; {enough} are enough", "say how many it will run on with --ranks")
    if problem:
        what = figure if plan.on_gpu > gpu.memory else f"{problem}; {figure}"
        return error("memory", what, _advice(run, share=1.0) or "use more GPUs or another model")
    if not plan.comfortable:
        advice = _advice(run, share=COMFORTABLE)
        return warning("memory", f"{figure}: {plan.share:.0%} of a GPU", advice or "watch memory in the first steps")
    return ok("memory", figure)


def _counted(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def _enough_ranks(run: Run) -> int | None:
    """The first multiple of the ranks on which the run fits as it is."""
    for factor in MORE_GPUS:
        larger = replace(run, layout=replace(run.layout, gpus=factor * run.layout.gpus)).plan()
        if not larger.problem:
            return larger.layout.gpus
    return None


def _figure(plan: Plan) -> str:
    fullest = max(plan.stages, key=lambda stage: stage.on_gpu)
    held = memory_parts(fullest) | {"beside torch's allocator": plan.on_gpu - fullest.peak}
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in held.items())
    memory = plan.layout.gpu.memory
    return f"the fullest rank needs {plan.on_gpu / GIB:.1f} of {memory / GIB:.1f} GiB ({parts})"


def _advice(run: Run, *, share: float) -> str:
    fix = find_fix(run, share=share)
    return "" if fix is None else f"{fix} (then {fix.plan.on_gpu / GIB:.1f} GiB)"
