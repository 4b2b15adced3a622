"""Everything about a configuration that can be known before it runs."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron_dppo.config.load import load_config
from megatron_dppo.config.schema import Config
from megatron_dppo.doctor.finding import Finding, error, warning
from megatron_dppo.doctor.machine import MIB, check_shared_memory
from megatron_dppo.doctor.memory import card_here, check_memory, fewest_ranks
from megatron_dppo.errors import UserError
from megatron_dppo.launch.secrets import redact
from megatron_dppo.models.hf_config import HFConfig, load_hf_config
from megatron_dppo.planner.gpus import Gpu

_STATE_BYTES = 14
"""Of a training state, per parameter: bf16 weights, float32 master weights and both moments."""


def check_configuration(
    file: Path, overrides: list[str], *, ranks: int | None, gpu: Gpu | None = None
) -> Iterator[Finding]:
    """Findings about the run that `file` with `overrides` describes, on `ranks` ranks (default: the fewest it can use).
    Its memory has to fit `gpu`, or the card of this machine.

    Later checks need what earlier ones read; where that fails they are left out.
    """
    yield from _secrets(file)
    config, problems = _attempt("config", "correct the file or the override", lambda: load_config(file, overrides))
    yield from problems
    if config is None:
        return
    model, problems = _attempt(
        "model", "point model.path to a Hugging Face folder", lambda: load_hf_config(config.model.path)
    )
    yield from problems
    yield from _folder(config)
    yield from _times(config)
    if config.rollout.object_store_mib:
        yield from check_shared_memory(config.rollout.object_store_mib)
    if model is None:
        return
    yield from _layout(config, model, ranks)
    yield from _batches(config, ranks)
    yield from _lengths(config, model)
    yield from _together(config, model)
    yield from check_memory(config, model, ranks=ranks, gpu=gpu or card_here())
    yield from _files(config, model)
    yield from _disk(config, model)


def _attempt[T](check: str, fix: str, work: Callable[[], T]) -> tuple[T | None, list[Finding]]:
    """What `work` returns, or the finding that its error is."""
    try:
        return work(), []
    except UserError as problem:
        return None, [error(check, str(problem), fix)]


def _secrets(file: Path) -> Iterator[Finding]:
    """A run writes its configuration to its folder: what is secret belongs in the environment."""
    if not file.is_file():
        return
    text = file.read_text(errors="replace")
    if redact(text) != text:
        yield error(
            "secrets", f"{file} holds what looks like a secret", "write ${oc.env:NAME} in its place, and set NAME"
        )


def _layout(config: Config, model: HFConfig, ranks: int | None) -> Iterator[Finding]:
    world = ranks or fewest_ranks(config.parallel)
    yield from _attempt(
        "layout", f"the model has to fit {world} ranks", lambda: config.parallel.check_fits(model, world)
    )[1]


def _batches(config: Config, ranks: int | None) -> Iterator[Finding]:
    trainer = config.trainer
    data = max(1, config.parallel.data(ranks or fewest_ranks(config.parallel)))
    sequences = trainer.prompts_per_mini_batch * trainer.samples_per_prompt
    if sequences < data:
        yield error(
            "batch",
            f"a gradient step has {sequences} sequences for {data} data-parallel ranks: some would train on nothing",
            "raise trainer.prompts_per_mini_batch, or use more model parallelism",
        )


def _lengths(config: Config, model: HFConfig) -> Iterator[Finding]:
    rollout, actor = config.rollout, config.actor
    longest = rollout.max_model_len
    if longest > model.max_position_embeddings:
        yield error(
            "lengths",
            f"prompts and responses reach {longest} tokens, the model {model.max_position_embeddings}",
            "lower rollout.max_response_tokens",
        )
    if longest > actor.max_tokens_per_microbatch and actor.long_sequences == "refuse":
        yield error(
            "lengths",
            f"a sequence may have {longest} tokens, a microbatch {actor.max_tokens_per_microbatch}: "
            "the first long answer stops the run",
            f"set actor.max_tokens_per_microbatch={longest}, or actor.long_sequences=alone",
        )


def _together(config: Config, model: HFConfig) -> Iterator[Finding]:
    """What training checks at its start."""
    from megatron_dppo.trainer.train import check_model_against

    yield from _attempt("algorithm", "see docs/algorithms.md", lambda: check_model_against(config, model))[1]


def _times(config: Config) -> Iterator[Finding]:
    run, rollout = config.run, config.rollout
    if run.collective_timeout_minutes * 60 < rollout.sync_timeout_s:
        yield error(
            "timeouts",
            f"ranks give up after {run.collective_timeout_minutes:g} min, but a weight sync may wait "
            f"{rollout.sync_timeout_s / 60:g} min for an engine that hangs",
            "raise run.collective_timeout_minutes",
        )
    if run.hang_minutes > run.collective_timeout_minutes:
        yield warning(
            "timeouts",
            f"run.hang_minutes={run.hang_minutes:g} is longer than run.collective_timeout_minutes: "
            "a hung rank would not be named before the others give up",
            "lower run.hang_minutes",
        )


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
        yield from _attempt(
            "resume", "set trainer.resume=false to start anew", lambda: latest_state(checkpoint_root(config))
        )[1]
    else:
        yield from _attempt("run-folder", "each run has a folder of its own", lambda: require_unused(folder))[1]


def _files(config: Config, model: HFConfig) -> Iterator[Finding]:
    """Weights and tokenizer of the model, by their headers; what is trained and evaluated on."""
    from megatron_dppo.checkpoint.hf_files import HFFiles
    from megatron_dppo.checkpoint.hf_import import check_tensors, stores_stacked_experts

    def weights() -> None:
        files = HFFiles(config.model.path)
        check_tensors(files, model, stores_stacked_experts(files, model))

    if not config.model.random_weights:
        yield from _attempt("weights", "fetch the checkpoint again", weights)[1]
    yield from _task(config)


def _task(config: Config) -> Iterator[Finding]:
    from megatron_dppo.tasks.tokenizer import load_tokenizer
    from megatron_dppo.trainer.examiner import build_examiner

    tokenizer, problems = _attempt("tokenizer", "prompts cannot be encoded", lambda: load_tokenizer(config.model.path))
    yield from problems
    if tokenizer is None:
        return
    try:
        build_examiner(config, tokenizer).close()
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
