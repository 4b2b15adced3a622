"""Everything about a configuration that can be known before it runs; by the planner, whether its memory fits."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from megatron_dppo.config.load import load_config
from megatron_dppo.config.schema import Config
from megatron_dppo.doctor.machine import MIB, check_shared_memory
from megatron_dppo.errors import UserError, first_line
from megatron_dppo.launch.folders import existing, require_writable
from megatron_dppo.launch.secrets import redact
from megatron_dppo.models.hf_config import HFConfig, load_hf_config
from megatron_dppo.models.parallel import ParallelConfig
from megatron_dppo.planner.fix import MORE_GPUS, find_fix
from megatron_dppo.planner.gpus import GIB, Gpu, gpu_of_device
from megatron_dppo.planner.parameters import stage_adapters
from megatron_dppo.planner.plan import COMFORTABLE, Plan, Run, memory_problem
from megatron_dppo.planner.report import memory_parts
from megatron_dppo.planner.run import engine_gpus, planned_run
from megatron_dppo.preflight.finding import Finding, attempt, error, ok, warning
from megatron_dppo.preflight.rules import check_model, check_sections
from megatron_dppo.trainer.sinks import require_services

_OPTIMIZER_BYTES = 12
"""Of a training state, per trained parameter beside the weight: float32 master weights and both moments."""


def check_configuration(
    file: Path, overrides: list[str], *, ranks: int | None, gpu: Gpu | None = None
) -> Iterator[Finding]:
    """Findings about the run that `file` with `overrides` describes, on `ranks` ranks (default: the fewest it can use).
    Its memory has to fit `gpu`, or the GPU of this machine.

    Later checks need what earlier ones read; where that fails they are left out.
    """
    yield from _secrets(file)
    config = yield from attempt("config", "correct the file or the override", lambda: load_config(file, overrides))
    if config is None:
        return
    model = yield from attempt(
        "model", "point model.path to a Hugging Face folder", lambda: load_hf_config(config.model.path)
    )
    yield from check_sections(config)
    yield from attempt("tracking", "see docs/metrics.md", lambda: require_services(config.tracking))
    yield from _folder(config)
    if config.rollout.object_store_mib:
        yield from check_shared_memory(config.rollout.object_store_mib)
    if model is None:
        return
    yield from check_model(config, model, ranks or config.parallel.fewest_ranks)
    yield from _adapter(config, model)
    yield from check_memory(config, model, ranks=ranks, gpu=gpu or gpu_here())
    yield from _files(config, model)
    yield from _disk(config, model)


def _secrets(file: Path) -> Iterator[Finding]:
    """A run writes its configuration to its folder: what is secret belongs in the environment."""
    text = ""
    with suppress(OSError):  # whoever loads it says what is wrong
        text = file.read_text(errors="replace") if file.is_file() else ""
    if redact(text) != text:
        yield error(
            "secrets", f"{file} holds what looks like a secret", "write ${oc.env:NAME} in its place, and set NAME"
        )


def _adapter(config: Config, model: HFConfig) -> Iterator[Finding]:
    """The adapter that training begins with."""
    from megatron_dppo.checkpoint.peft_adapter import check_peft_adapter

    if config.lora and config.lora.adapter:
        folder, lora = config.lora.adapter, config.lora
        yield from attempt("lora", "see docs/lora.md", lambda: check_peft_adapter(folder, model, lora))


def _folder(config: Config) -> Iterator[Finding]:
    """The run's folder: can be written, is new or can be resumed."""
    from megatron_dppo.checkpoint.state_folder import latest_state
    from megatron_dppo.trainer.checkpoints import checkpoint_root
    from megatron_dppo.trainer.resume import check_changed
    from megatron_dppo.trainer.tracking import require_unused

    folder = config.run.dir
    wrong = [*attempt("run-folder", "", lambda: require_writable(folder, named=f"run.dir={folder}"))]
    yield from wrong
    if wrong:
        return
    yield from attempt("resume", "", lambda: check_changed(config))
    if config.trainer.resume:
        yield from attempt("resume", "", lambda: latest_state(checkpoint_root(config)))
    else:
        yield from attempt("run-folder", "each run has a folder of its own", lambda: require_unused(folder))


def _files(config: Config, model: HFConfig) -> Iterator[Finding]:
    """Weights and tokenizer of the model, by their headers; what is trained and evaluated on."""
    from megatron_dppo.checkpoint.hf_files import HFFiles
    from megatron_dppo.checkpoint.hf_import import check_tensors, stores_stacked_experts

    def weights() -> None:
        files = HFFiles(config.model.path)
        check_tensors(files, model, stores_stacked_experts(files, model))

    if not config.model.random_weights:
        yield from attempt("weights", "fetch the checkpoint again", weights)
    yield from _task(config)


def _task(config: Config) -> Iterator[Finding]:
    from megatron_dppo.tasks.tokenizer import load_tokenizer
    from megatron_dppo.trainer.task_suite import build_task_suite

    path = config.model.path
    tokenizer = yield from attempt("tokenizer", "prompts cannot be encoded", lambda: load_tokenizer(path))
    if tokenizer is None:
        return
    try:
        build_task_suite(config, tokenizer).close()
    except (UserError, ValueError, OSError, RuntimeError) as problem:  # the last of workers that do not start
        yield error("task", first_line(problem), "correct the task and evaluation sections")


def _disk(config: Config, model: HFConfig) -> Iterator[Finding]:
    """Room for the training states that are kept, the one being written, and the exported model."""
    import torch

    parameters = sum(math.prod(shape) for shape in model.tensors.values())
    adapters = stage_adapters(model, ParallelConfig(), 0, config.lora).total if config.lora else None
    trained = parameters if adapters is None else adapters
    weight = getattr(torch, config.actor.dtype).itemsize
    states = (config.trainer.keep_checkpoints + 1) if config.trainer.checkpoint_every else 0
    wanted = states * trained * (weight + _OPTIMIZER_BYTES)
    wanted += weight * ((parameters if config.trainer.export_hugging_face else 0) + (adapters or 0))
    there = existing(config.run.dir)
    free = shutil.disk_usage(there).free
    if free < wanted:
        yield error(
            "disk",
            f"{there} has {free // MIB:,} MiB free; the states and the model of this run take {wanted // MIB:,} MiB",
            "free space, lower trainer.keep_checkpoints, or choose another run.dir",
        )


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
