"""What a conversion reads: a Hugging Face folder, a training state, or a checkpoint of Megatron-LM's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from megatron_dppo.checkpoint import state_folder
from megatron_dppo.checkpoint.first_rank import on_first_rank
from megatron_dppo.checkpoint.hf_files import HFFiles, StoredTensor
from megatron_dppo.checkpoint.hf_import import (
    check_tensors,
    check_tokenizer,
    fill_parameters,
    load_hf_weights,
    stores_stacked_experts,
)
from megatron_dppo.checkpoint.hf_side_files import CONFIG
from megatron_dppo.checkpoint.megatron_files import MegatronFiles, find_iteration
from megatron_dppo.checkpoint.megatron_save import check_same_model
from megatron_dppo.checkpoint.quantized import FIELD, is_quantized, reader
from megatron_dppo.checkpoint.training_state import Trainee, TrainingStates, model_signature
from megatron_dppo.errors import UserError
from megatron_dppo.json_object import read_json_object
from megatron_dppo.models.hf_config import HFConfig, load_hf_config, resolve_hf_config
from megatron_dppo.models.lora.attach import attach_adapters
from megatron_dppo.models.lora.config import LoraConfig
from megatron_dppo.models.megatron_config import transformer_config
from megatron_dppo.models.parallel import ParallelConfig

Format = Literal["hf", "state", "megatron-lm"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


FINER = "float32"
"""Of a converted state's progress: names of `Source.finer`."""


@dataclass(frozen=True)
class Source:
    """What a conversion reads, found to be whole and of its model."""

    format: Format
    model: HFConfig
    dtype: torch.dtype
    """Of most of its weights."""
    file: Path
    """One of its files, to see how fast they are read."""
    load: Callable[[list[GPTModel], ProcessGroupCollection], None]
    """Fills the parameters of this rank's chunks, which are of any dtype; of a training state, of its own. With
    `lora` they get adapters. Collective."""
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    """Where each has a type of its own."""
    finer: frozenset[str] = frozenset()
    """Tensors of float32 in a folder or state whose others are 16-bit (Qwen3.5's `A_log`, MiniMax's routers)."""
    lora: LoraConfig | None = None
    quantized: bool = False
    """Of a Hugging Face folder: its weights are stored in few bits and read as bfloat16 (`quantized.py`)."""


def open_source(source: Path, base: Path | None, layout: ParallelConfig, allow_inf: bool, console: Console) -> Source:
    if (source / CONFIG).is_file():
        if base:
            raise UserError(f"{source} is a Hugging Face folder; leave --base out")
        return _hugging_face(source, allow_inf, console)
    is_state = (source / state_folder.DESCRIPTION).is_file() or (source / state_folder.HF / CONFIG).is_file()
    if not is_state and not state_folder.finished_states(source):
        iteration = on_first_rank(lambda: find_iteration(source))
        if iteration is not None:
            return _megatron_lm(iteration, base, allow_inf, console)
    return _state(source, base, layout, console)


def _hugging_face(source: Path, allow_inf: bool, console: Console) -> Source:
    raw = read_json_object(source / CONFIG)
    quantized = is_quantized(raw)
    if quantized:
        read_as = reader(raw, source / CONFIG)
        model = resolve_hf_config({name: value for name, value in raw.items() if name != FIELD}, path=source)
        files, held = read_as(source), torch.bfloat16
    else:
        model, files = load_hf_config(source), HFFiles(source)
        held = files.dtype if files.dtype in DTYPES.values() else torch.float32
    stacked = stores_stacked_experts(files, model)
    check_tensors(files, model, stacked)
    check_tokenizer(source, model)
    finer = frozenset(
        name
        for name, tensor in files.tensors.items()
        if tensor.dtype is torch.float32 and held.itemsize < 4 and name in model.tensors and not quantized
    )

    def load(models: list[GPTModel], groups: ProcessGroupCollection) -> None:
        with progress_bar(console, "reading") as progress:
            fill_parameters(models, model, groups, files, stacked=stacked, progress=progress, allow_inf=allow_inf)

    first = next(iter(files.tensors.values())).file
    return Source("hf", model, held, first, load, files.tensors, finer, quantized=quantized)


def _megatron_lm(folder: Path, base: Path | None, allow_inf: bool, console: Console) -> Source:
    if base is None:
        raise UserError(
            f"{folder} is Megatron-LM's and has no Hugging Face configuration; name the folder whose config.json and "
            "tokenizer go with it with --base HF_FOLDER"
        )
    model = load_hf_config(base)
    files = MegatronFiles(folder, model)
    check_same_model(files, model, transformer_config(model, ParallelConfig()))
    check_tokenizer(base, model)
    if files.left_out:
        console.print(
            f"the optimizer in {folder} is left out ({len(files.left_out)} tensors, {files.left_out[0]} first): its "
            "state is that of another optimizer's layout",
            soft_wrap=True,
        )
    held = files.dtype if files.dtype in DTYPES.values() else torch.float32

    def load(models: list[GPTModel], groups: ProcessGroupCollection) -> None:
        with progress_bar(console, "reading") as progress:
            fill_parameters(models, model, groups, files, progress=progress, allow_inf=allow_inf)

    return Source("megatron-lm", model, held, next(iter(files.tensors.values())).file, load, files.tensors)


def _state(source: Path, base: Path | None, layout: ParallelConfig, console: Console) -> Source:
    is_state = (source / state_folder.DESCRIPTION).is_file()
    try:
        folder = source if is_state else state_folder.latest_state(source)
    except UserError as error:
        hint = "its checkpoints/ may be meant" if (source / "checkpoints").is_dir() else "name another folder"
        reason = str(error).removeprefix("cannot resume: ").removesuffix(state_folder.START_ANEW)
        raise UserError(
            f"{source} is no Hugging Face folder (no {CONFIG}), none of Megatron-LM's and no training state "
            f"({reason}); {hint}"
        ) from None
    state_folder.require_whole(folder)
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

    def load(models: list[GPTModel], groups: ProcessGroupCollection) -> None:
        if lora:
            console.print(f"reading {base}")
            load_hf_weights(models, model, groups, base)
            attach_adapters(models, model, groups, lora)
        console.print(f"reading {folder}")
        trainee = Trainee(model=model, models=models, groups=groups, parallel=layout, lora=lora)
        TrainingStates(folder.parent, trainee).load(folder, checked=True)

    largest = max(folder.rglob("*.distcp"), key=lambda f: f.stat().st_size)
    said = described["progress"].get(FINER)
    finer = frozenset(name for name in said if name in model.tensors) if isinstance(said, list) else frozenset()
    return Source("state", model, held, largest, load, finer=finer, lora=lora)


@contextmanager
def progress_bar(console: Console, verb: str) -> Iterator[Callable[[int, int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task(verb, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)
