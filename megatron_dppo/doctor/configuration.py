"""Everything about a configuration that can be known before it runs."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path

from megatron_dppo.config.load import load_config
from megatron_dppo.config.schema import Config
from megatron_dppo.doctor.machine import MIB, check_shared_memory
from megatron_dppo.doctor.memory import check_memory, gpu_here
from megatron_dppo.errors import UserError
from megatron_dppo.launch.secrets import redact
from megatron_dppo.models.hf_config import HFConfig, load_hf_config
from megatron_dppo.planner.gpus import Gpu
from megatron_dppo.preflight.finding import Finding, attempt, error
from megatron_dppo.preflight.rules import check_model, check_sections

_STATE_BYTES = 14
"""Of a training state, per parameter: bf16 weights, float32 master weights and both moments."""


def check_configuration(
    file: Path, overrides: list[str], *, ranks: int | None, gpu: Gpu | None = None
) -> Iterator[Finding]:
    """Findings about the run that `file` with `overrides` describes, on `ranks` ranks (default: the fewest it can use).
    Its memory has to fit `gpu`, or the GPU of this machine.

    Later checks need what earlier ones read; where that fails they are left out.
    """
    yield from _secrets(file)
    config, problems = attempt("config", "correct the file or the override", lambda: load_config(file, overrides))
    yield from problems
    if config is None:
        return
    model, problems = attempt(
        "model", "point model.path to a Hugging Face folder", lambda: load_hf_config(config.model.path)
    )
    yield from problems
    yield from check_sections(config)
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
    if not file.is_file():
        return
    text = file.read_text(errors="replace")
    if redact(text) != text:
        yield error(
            "secrets", f"{file} holds what looks like a secret", "write ${oc.env:NAME} in its place, and set NAME"
        )


def _adapter(config: Config, model: HFConfig) -> Iterator[Finding]:
    """The adapter that training begins with."""
    from megatron_dppo.checkpoint.peft_adapter import check_peft_adapter

    if config.lora and config.lora.adapter:
        folder, lora = config.lora.adapter, config.lora
        yield from attempt("lora", "see docs/lora.md", lambda: check_peft_adapter(folder, model, lora))[1]


def _folder(config: Config) -> Iterator[Finding]:
    """The run's folder: can be written, is new or can be resumed."""
    from megatron_dppo.checkpoint.state_folder import latest_state
    from megatron_dppo.trainer.checkpoints import checkpoint_root
    from megatron_dppo.trainer.tracking import require_unused

    folder = config.run.dir
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        if not existing.is_dir():
            raise NotADirectoryError(20, "a file is in its place")
        probe = existing / ".megatron-dppo-doctor"
        probe.touch()
        probe.unlink()
    except OSError as problem:
        yield error("run-folder", f"run.dir={folder} cannot be made: {existing}: {problem.strerror}", "choose another")
        return
    if config.trainer.resume:
        yield from attempt(
            "resume", "set trainer.resume=false to start anew", lambda: latest_state(checkpoint_root(config))
        )[1]
    else:
        yield from attempt("run-folder", "each run has a folder of its own", lambda: require_unused(folder))[1]


def _files(config: Config, model: HFConfig) -> Iterator[Finding]:
    """Weights and tokenizer of the model, by their headers; what is trained and evaluated on."""
    from megatron_dppo.checkpoint.hf_files import HFFiles
    from megatron_dppo.checkpoint.hf_import import check_tensors, stores_stacked_experts

    def weights() -> None:
        files = HFFiles(config.model.path)
        check_tensors(files, model, stores_stacked_experts(files, model))

    if not config.model.random_weights:
        yield from attempt("weights", "fetch the checkpoint again", weights)[1]
    yield from _task(config)


def _task(config: Config) -> Iterator[Finding]:
    from megatron_dppo.tasks.tokenizer import load_tokenizer
    from megatron_dppo.trainer.task_suite import build_task_suite

    tokenizer, problems = attempt("tokenizer", "prompts cannot be encoded", lambda: load_tokenizer(config.model.path))
    yield from problems
    if tokenizer is None:
        return
    try:
        build_task_suite(config, tokenizer).close()
    except (UserError, ValueError, OSError) as problem:
        yield error("task", str(problem).splitlines()[0], "correct the task and evaluation sections")


def _disk(config: Config, model: HFConfig) -> Iterator[Finding]:
    """Room for the training states that are kept, the one being written, and the exported model."""
    parameters = sum(math.prod(shape) for shape in model.tensors.values())
    states = (config.trainer.keep_checkpoints + 1) if config.trainer.checkpoint_every else 0
    wanted = parameters * (states * _STATE_BYTES + (2 if config.trainer.export_hugging_face else 0))
    existing = next((path for path in (config.run.dir, *config.run.dir.absolute().parents) if path.is_dir()), None)
    if existing is None:
        return
    free = shutil.disk_usage(existing).free
    if free < wanted:
        yield error(
            "disk",
            f"{existing} has {free // MIB:,} MiB free; the states and the model of this run take {wanted // MIB:,} MiB",
            "free space, lower trainer.keep_checkpoints, or choose another run.dir",
        )
