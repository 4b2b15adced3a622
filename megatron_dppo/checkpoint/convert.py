"""Conversion between Hugging Face folders and Megatron-Core checkpoints, as a command."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from megatron_dppo.checkpoint import state_folder
from megatron_dppo.checkpoint.atomic import check_target, set_aside
from megatron_dppo.checkpoint.hf_files import HFFiles
from megatron_dppo.checkpoint.hf_import import check_tensors, load_hf_weights, stores_stacked_experts
from megatron_dppo.checkpoint.hf_save import SHARD_BYTES, save_hf_checkpoint
from megatron_dppo.checkpoint.hf_side_files import CONFIG
from megatron_dppo.checkpoint.training_state import Trainee, TrainingStates, model_signature
from megatron_dppo.checkpoint.verify import compare_with_transformers
from megatron_dppo.compat import megatron_cpu
from megatron_dppo.errors import UserError
from megatron_dppo.launch.lease import FOLDER as LEASE
from megatron_dppo.launch.lease import lease
from megatron_dppo.launch.network import init_process_group
from megatron_dppo.models.build import build_model
from megatron_dppo.models.groups import initialize_groups
from megatron_dppo.models.hf_config import HFConfig, load_hf_config
from megatron_dppo.models.lora.attach import attach_adapters
from megatron_dppo.models.lora.config import LoraConfig
from megatron_dppo.models.megatron_config import transformer_config
from megatron_dppo.models.parallel import ParallelConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_PROBED_BYTES = 64 * 2**20


def convert_command(
    source: Path,
    output: Path,
    *,
    parallel: ParallelConfig | None = None,
    dtype: str | None = None,
    verify: bool = False,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
    base: Path | None = None,
    allow_inf: bool = False,
    console: Console | None = None,
) -> None:
    """Convert `source` to the other format in `output`, in this process or in all ranks that torchrun started.

    A source with a config.json is a Hugging Face folder: `output` gets a Megatron-Core checkpoint (weights only,
    `output/step_00000000` and `output/latest`) that any layout can load. Otherwise it is a training state, or the root
    of several (`latest` is taken): `output` becomes a Hugging Face folder.

    parallel     layout of the conversion itself (it decides who reads what, not what is written); default one rank
    dtype        of the result: float32, bfloat16 or float16; default what the source holds
    verify       read the result again and compare its logits on sample prompts with transformers'
    overwrite    replace a folder at `output`; it stays as it is where the conversion fails
    shard_bytes  largest Hugging Face weight file
    base         the Hugging Face folder that adapters were trained on: a state of theirs holds nothing else, and
                 becomes that model with the adapters merged
    allow_inf    numbers beyond the range of dtype (65504 for float16) become inf; else the tensor is named and refused

    `UserError` before any work: no such source, weights that do not match the config, a layout that does not fit, no
    room on the disk, an output that exists. Works without a GPU.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is unknown; choose one of {', '.join(DTYPES)}")
    if not source.is_dir():
        raise UserError(f"{source} does not exist or is no folder")
    check_target(output, overwrite=overwrite)
    for read in (source, base):
        if read is not None and output.resolve() in (read.resolve(), *read.resolve().parents):
            raise UserError(f"{output} is or holds {read}, which is read: writing it would delete that; choose another")
    rank = int(os.environ.get("RANK", "0"))
    console = console or Console(stderr=True, quiet=rank != 0)
    layout = parallel or ParallelConfig()
    place = output.parent / f".{output.name}{LEASE}"
    with lease(place, of=str(output)) if rank == 0 else nullcontext(), _world():
        check_target(output, overwrite=overwrite)  # again: another process may have been writing it
        if (source / CONFIG).is_file():
            _to_megatron(source, output, layout, dtype, verify, allow_inf, console)
        else:
            _to_hugging_face(source, output, layout, dtype, verify, overwrite, shard_bytes, base, allow_inf, console)


def _to_megatron(
    source: Path,
    output: Path,
    layout: ParallelConfig,
    dtype: str | None,
    verify: bool,
    allow_inf: bool,
    console: Console,
) -> None:
    model = load_hf_config(source)
    files = HFFiles(source)
    check_tensors(files, model, stores_stacked_experts(files, model))
    most = files.dtype
    wanted = DTYPES[dtype] if dtype else most if most in DTYPES.values() else torch.float32
    size = _describe(model, wanted, next(iter(files.tensors.values())).file, console)
    wider = [name for name, tensor in files.tensors.items() if tensor.dtype.itemsize > wanted.itemsize]
    if wider and not dtype:
        console.print(
            f"{len(wider)} of {len(files.tensors)} tensors are stored more finely and are rounded ({wider[0]}); "
            "--dtype float32 keeps them",
            soft_wrap=True,
        )
    _check_room(output, size)
    models, groups = _build(model, layout, wanted)
    with _bar(console, "reading") as progress:
        load_hf_weights(models, model, groups, progress=progress, allow_inf=allow_inf)
    states = TrainingStates(output, Trainee(model=model, models=models, groups=groups, parallel=layout))
    console.print(f"writing {output}")
    with _replaced(output):
        states.save(0, {"converted_from": str(source)})
    if verify:
        with torch.no_grad():
            for chunk in models:
                for parameter in chunk.parameters():
                    parameter.fill_(float("nan"))  # what is not read again will show
        states.load()
        _verify(models, model, groups, layout, source, console)
    console.print(f"done: {state_folder.latest_state(output)}")


def _to_hugging_face(
    source: Path,
    output: Path,
    layout: ParallelConfig,
    dtype: str | None,
    verify: bool,
    overwrite: bool,
    shard_bytes: int,
    base: Path | None,
    allow_inf: bool,
    console: Console,
) -> None:
    is_state = (source / state_folder.DESCRIPTION).is_file()
    try:
        folder = source if is_state else state_folder.latest_state(source)
    except UserError as error:
        hint = "its checkpoints/ may be meant" if (source / "checkpoints").is_dir() else "name another folder"
        reason = str(error).removeprefix("cannot resume: ")
        raise UserError(
            f"{source} is no Hugging Face folder (no {CONFIG}) and no training state ({reason}); {hint}"
        ) from None
    state_folder.require_whole(folder, resuming=False)
    described = state_folder.read_description(folder)
    model = load_hf_config(folder / state_folder.HF)
    held = DTYPES.get(described["dtype"].removeprefix("torch."))
    if held is None:
        raise UserError(f"{folder} holds {described['dtype']}; only {', '.join(DTYPES)} can be converted")
    try:
        lora = LoraConfig.model_validate(described["lora"]) if described["lora"] else None
    except ValidationError as error:
        raise UserError(f"{folder}/{state_folder.DESCRIPTION}: lora is none of this version: {error}") from None
    if lora and base is None:
        raise UserError(f"{folder} holds adapters only; name the model that they were trained on with --base HF_FOLDER")
    if base and not lora:
        raise UserError(f"{folder} holds all weights of its model; leave --base out")
    if base and model_signature(load_hf_config(base)) != model_signature(model):
        raise UserError(f"the adapters in {folder} are of another model than {base}")
    wanted = DTYPES[dtype] if dtype else held
    largest = max(folder.rglob("*.distcp"), key=lambda f: f.stat().st_size)
    _check_room(output, _describe(model, wanted, largest, console))

    models, groups = _build(model, layout, held)
    if lora:
        console.print(f"reading {base}")
        load_hf_weights(models, model, groups, base)
        attach_adapters(models, model, groups, lora)
    console.print(f"reading {folder}")
    trainee = Trainee(model=model, models=models, groups=groups, parallel=layout, lora=lora)
    TrainingStates(folder.parent, trainee).load(folder, checked=True)
    with _bar(console, "writing") as progress:
        save_hf_checkpoint(
            output,
            models,
            model,
            groups,
            dtype=wanted,
            shard_bytes=shard_bytes,
            overwrite=overwrite,
            progress=progress,
            allow_inf=allow_inf,
        )
    if verify and lora:
        models = build_model(model, transformer_config(model, layout, params_dtype=wanted), groups)
        load_hf_weights(models, model, groups, output)
    if verify:
        with torch.no_grad():
            for chunk in models:
                chunk.to(wanted)
        _verify(models, model, groups, layout, output, console)
    console.print(f"done: {output}")


@contextmanager
def _replaced(output: Path) -> Iterator[None]:
    """What is at `output` makes room for what the block writes there, and comes back where that fails. Collective."""
    old = set_aside(output) if dist.get_rank() == 0 else None
    dist.barrier()
    try:
        yield
    except BaseException:
        if old is not None:
            shutil.rmtree(output, ignore_errors=True)
            old.rename(output)
        raise
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def _build(
    model: HFConfig, layout: ParallelConfig, dtype: torch.dtype
) -> tuple[list[GPTModel], ProcessGroupCollection]:
    layout.check_fits(model, dist.get_world_size())
    groups = initialize_groups(layout, seed=0)
    models = build_model(model, transformer_config(model, layout, params_dtype=dtype), groups)
    for gpt in models:
        gpt.eval()
    return models, groups


def _verify(
    models: list[GPTModel],
    model: HFConfig,
    groups: ProcessGroupCollection,
    layout: ParallelConfig,
    folder: Path,
    console: Console,
) -> None:
    console.print("verifying against transformers")
    console.print(f"verified: {compare_with_transformers(models, model, groups, layout, folder)}", soft_wrap=True)


def _describe(model: HFConfig, dtype: torch.dtype, file: Path, console: Console) -> int:
    """Print what is to be converted and about how long it takes; return its bytes."""
    numbers = sum(torch.Size(shape).numel() for shape in model.tensors.values())
    size, rate = numbers * dtype.itemsize, _read_rate(file)
    console.print(
        f"{model.family.architecture}: {numbers:,} parameters in {len(model.tensors):,} tensors, "
        f"{size / 1e6:,.1f} MB as {str(dtype).removeprefix('torch.')}; about {2 * size / rate:,.0f} s if the disk "
        f"keeps the {rate / 1e6:,.0f} MB/s at which {file.name} begins to read",
        soft_wrap=True,
    )
    return size


def _read_rate(file: Path) -> float:
    """Bytes per second over the first 64 MiB of a file."""
    start = time.perf_counter()
    with file.open("rb", buffering=0) as handle:
        count = len(handle.read(_PROBED_BYTES))
    return count / max(1e-6, time.perf_counter() - start)


def _check_room(output: Path, needed: int) -> None:
    existing = output
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise UserError(f"{output} needs {needed / 1e9:.2f} GB, {existing} has {free / 1e9:.2f} GB free; make room")


@contextmanager
def _bar(console: Console, verb: str) -> Iterator[Callable[[int, int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task(verb, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)


@contextmanager
def _world() -> Iterator[None]:
    """The ranks torchrun started, or this process alone; a process group that is there already stays."""
    megatron_cpu.install()
    if dist.is_initialized():
        yield
        return
    gpu = torch.cuda.is_available()
    backend, patience = ("cpu:gloo,cuda:nccl" if gpu else "gloo"), timedelta(hours=1)
    if "RANK" in os.environ:
        if gpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        init_process_group(backend, patience)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=patience)
    try:
        yield
    finally:
        if parallel_state.is_initialized():
            parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
