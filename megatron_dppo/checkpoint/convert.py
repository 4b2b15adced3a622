"""Conversion between Hugging Face folders, training states and Megatron-LM's checkpoints, as a command."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import get_args

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from rich.console import Console

from megatron_dppo.checkpoint import state_folder
from megatron_dppo.checkpoint.atomic import check_target, require_room, set_aside
from megatron_dppo.checkpoint.carried import carried
from megatron_dppo.checkpoint.convert_sources import DTYPES, FINER, Format, Source, open_source, progress_bar
from megatron_dppo.checkpoint.first_rank import raise_from_any
from megatron_dppo.checkpoint.hf_files import converted
from megatron_dppo.checkpoint.hf_import import fill_parameters, load_hf_weights
from megatron_dppo.checkpoint.hf_save import SHARD_BYTES, save_hf_checkpoint
from megatron_dppo.checkpoint.megatron_files import RELEASE, MegatronFiles
from megatron_dppo.checkpoint.megatron_save import save_megatron_checkpoint
from megatron_dppo.checkpoint.training_state import Trainee, TrainingStates
from megatron_dppo.checkpoint.verify import compare_with_transformers
from megatron_dppo.compat import megatron_cpu
from megatron_dppo.errors import UserError
from megatron_dppo.launch.lease import FOLDER as LEASE
from megatron_dppo.launch.lease import lease
from megatron_dppo.launch.network import init_process_group
from megatron_dppo.models.build import build_model
from megatron_dppo.models.groups import initialize_groups
from megatron_dppo.models.hf_config import HFConfig
from megatron_dppo.models.live import buffers, owned_parameters
from megatron_dppo.models.megatron_config import transformer_config
from megatron_dppo.models.parallel import ParallelConfig

FORMATS: tuple[Format, ...] = get_args(Format)
_NAMES = {"hf": "a Hugging Face folder", "state": "a training state", "megatron-lm": "a folder of Megatron-LM's"}
_PROBED_BYTES = 64 * 2**20


def convert_command(
    source: Path,
    output: Path,
    *,
    to: Format | None = None,
    parallel: ParallelConfig | None = None,
    dtype: str | None = None,
    verify: bool = False,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
    base: Path | None = None,
    allow_inf: bool = False,
) -> None:
    """Convert `source` to another format in `output`, in this process or in all ranks that torchrun started.

    A source with a config.json is a Hugging Face folder. One with training states is such a state, or the root of
    several (`latest` is taken). One of Megatron-LM or Megatron-Bridge (torch_dist) is the folder of an iteration, or
    the root whose marker names one; what it holds beside the weights is left out.

    to           `hf`; `state`: weights only, `output/step_00000000` and `output/latest`, which any layout can load;
                 `megatron-lm`: `output/release` and its marker. Default: hf, of a Hugging Face folder a state
                 (of one with weights in 8 or 4 bits, which become bfloat16: hf)
    parallel     layout of the conversion itself (it decides who reads what, not what is written); default one rank
    dtype        of the result: float32, bfloat16 or float16; default what the source holds
    verify       read the result again and compare its logits on sample prompts with transformers'
    overwrite    replace a folder at `output`; it stays as it is where the conversion fails
    shard_bytes  largest Hugging Face weight file
    base         the Hugging Face folder that adapters were trained on: a state of theirs holds nothing else, and
                 becomes that model with the adapters merged. Of a Megatron-LM folder: the one whose config.json and
                 tokenizer go with it; its weights are not read, but what it holds beside the model goes along
    allow_inf    numbers beyond the range of dtype (65504 for float16) become inf; else the tensor is named and refused

    `UserError` before any work: no such source, weights that do not match the config, a layout that does not fit, no
    room on the disk, an output that exists. Works without a GPU.
    """
    # What can be refused without opening anything.
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is unknown; choose one of {', '.join(DTYPES)}")
    if to is not None and to not in FORMATS:
        raise UserError(f"to {to!r} is unknown; choose one of {', '.join(FORMATS)}")
    if not source.is_dir():
        raise UserError(f"{source} does not exist or is no folder")
    check_target(output, overwrite=overwrite)
    for read in (source, base):
        if read is not None and output.resolve() in (read.resolve(), *read.resolve().parents):
            raise UserError(f"{output} is or holds {read}, which is read: writing it would delete that; choose another")

    rank = int(os.environ.get("RANK", "0"))
    console = Console(stderr=True, quiet=rank != 0, markup=False)
    layout = parallel or ParallelConfig()
    place = output.parent / f".{output.name}{LEASE}"
    with lease(place, of=str(output)) if rank == 0 else nullcontext(), _world():
        check_target(output, overwrite=overwrite)  # again: another process may have been writing it
        opened = open_source(source, base, layout, allow_inf, console)
        target = to or ("state" if opened.format == "hf" and not opened.quantized else "hf")
        _check_formats(source, opened, target, verify)
        wanted = DTYPES[dtype] if dtype else opened.dtype
        require_room(output, _describe(opened.model, wanted, opened.file, console))

        # Read: a state is loaded in its own type, and cast when it is written.
        models, groups = _build(opened.model, layout, opened.dtype if opened.format == "state" else wanted)
        kept = frozenset() if dtype or target == "megatron-lm" else _keep_finer(models, opened, groups)
        if not dtype:
            _say_rounded(opened, kept, console)
        opened.load(models, groups)

        # Write.
        if target == "hf":
            with progress_bar(console, "writing") as progress:
                save_hf_checkpoint(
                    output,
                    models,
                    opened.model,
                    groups,
                    dtype=wanted,
                    shard_bytes=shard_bytes,
                    overwrite=overwrite,
                    progress=progress,
                    allow_inf=allow_inf,
                    beside=base,
                    exact=kept,
                )
            if verify and opened.lora:
                config = transformer_config(opened.model, layout, params_dtype=wanted)
                models = build_model(opened.model, config, groups)
                load_hf_weights(models, opened.model, groups, output)
        elif target == "state":
            if not kept:
                _cast(models, wanted, allow_inf)
            console.print(f"writing {output}")
            states = TrainingStates(output, Trainee(model=opened.model, models=models, groups=groups, parallel=layout))
            with _replaced(output):
                states.save(0, {"converted_from": str(source), FINER: sorted(kept)})
        else:
            _cast(models, wanted, allow_inf)
            further = carried(opened.model, base or opened.model.path).tensors
            if further:
                console.print(
                    f"{len(further)} tensors of layers after the last are left out ({further[0].name} first): this "
                    "format has no place for them; converting back takes them from --base",
                    soft_wrap=True,
                )
            console.print(f"writing {output}")
            save_megatron_checkpoint(output, models, opened.model, groups, overwrite=overwrite)

        # Compare with transformers.
        if verify and target != "hf":
            _spoil(models)
            if target == "state":
                states.load()
            else:
                fill_parameters(models, opened.model, groups, MegatronFiles(output / RELEASE, opened.model))
        if verify:
            _cast(models, wanted, allow_inf=True)  # transformers rounds as well
            console.print("verifying against transformers")
            said = compare_with_transformers(models, opened.model, groups, layout, output if target == "hf" else source)
            console.print(f"verified: {said}", soft_wrap=True)
        console.print(f"done: {state_folder.latest_state(output) if target == 'state' else output}")


def _check_formats(source: Path, opened: Source, target: Format, verify: bool) -> None:
    if opened.format == target and not opened.quantized:
        raise UserError(f"{source} is {_NAMES[target]} already; choose another format with --to")
    if opened.quantized and verify and target != "hf":
        raise UserError(
            f"--verify compares with plain weights, and {source} has them in few bits; leave it or --to out"
        )
    if opened.lora and target != "hf":
        raise UserError(f"{source} holds adapters, which become {_NAMES['hf']} only; leave --to out")
    if verify and "hf" not in (opened.format, target):
        raise UserError(f"--verify compares with {_NAMES['hf']}, and neither side is one; leave it out")


@torch.no_grad()
def _keep_finer(models: list[GPTModel], opened: Source, groups: ProcessGroupCollection) -> frozenset[str]:
    """Make room for what is stored in float32 among 16-bit weights: parameters that hold nothing else. Returns the
    tensors of all ranks that have it. Collective."""
    mine = set()
    for owned in owned_parameters(models, opened.model, groups) if opened.finer else ():
        names = {piece.hf_name for piece in owned.pieces}
        if names and names <= opened.finer:
            owned.parameter.data = owned.parameter.data.float()
            mine |= names
    of_ranks: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    return frozenset().union(*of_ranks)


def _say_rounded(opened: Source, kept: frozenset[str], console: Console) -> None:
    model = opened.model
    wider = [
        name
        for name, tensor in opened.tensors.items()
        if tensor.dtype.itemsize > opened.dtype.itemsize
        and name not in model.float32_tensors
        and name not in kept
        and not model.carries(name)
    ]
    if wider:
        console.print(
            f"{len(wider)} of {len(opened.tensors)} tensors are stored more finely and are rounded ({wider[0]}); "
            "--dtype float32 keeps them",
            soft_wrap=True,
        )


@torch.no_grad()
def _cast(models: list[GPTModel], dtype: torch.dtype, allow_inf: bool) -> None:
    def cast() -> None:
        for chunk in models:
            for name, parameter in chunk.named_parameters():
                parameter.data = converted(name, parameter.data, dtype, allow_inf=allow_inf)

    raise_from_any(cast)


@torch.no_grad()
def _spoil(models: list[GPTModel]) -> None:
    """What is not read again will show."""
    for chunk in models:
        for tensor in (*chunk.parameters(), *(buffer for _, buffer in buffers(chunk))):
            tensor.fill_(float("nan"))


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
