"""Adapters as PEFT stores them: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from safetensors import safe_open

from megatron_dppo.checkpoint.atomic import check_target, write_synced
from megatron_dppo.checkpoint.checksums import write_checksums
from megatron_dppo.checkpoint.first_rank import on_first_rank, write_on_first_rank
from megatron_dppo.checkpoint.hf_export import ShardExporter
from megatron_dppo.checkpoint.hf_files import refuse_damaged, refuse_tensors, require_unchanged
from megatron_dppo.checkpoint.peft_stacked import StackedExperts
from megatron_dppo.checkpoint.safetensors_stream import SafetensorsStream
from megatron_dppo.errors import UserError
from megatron_dppo.json_object import read_json_object
from megatron_dppo.models.hf_config import HFConfig
from megatron_dppo.models.live import Owned
from megatron_dppo.models.lora.attach import adapters
from megatron_dppo.models.lora.config import LoraConfig
from megatron_dppo.models.lora.sites import adapter_tensors, sites
from megatron_dppo.models.names import Block

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_WITHOUT_EFFECT: dict[str, Any] = {
    "use_rslora": False,
    "use_dora": False,
    "lora_bias": False,
    "fan_in_fan_out": False,
    "bias": "none",
    "modules_to_save": None,
    "layer_replication": None,
}
"""Settings that would change the mathematics, with the only value supported."""


def adapter_exporter(
    models: Sequence[torch.nn.Module], model: HFConfig, groups: ProcessGroupCollection, config: LoraConfig
) -> ShardExporter:
    """Of the adapters of one model, by PEFT's names."""
    return ShardExporter(owned_adapters(models), adapter_tensors(model, config), groups)


def owned_adapters(models: Sequence[torch.nn.Module]) -> Iterator[Owned]:
    """The A and B parameters of this rank, as pieces of PEFT's tensors."""
    for adapter in adapters(models):
        for parameter, pieces in adapter.pieces():
            yield Owned(adapter.local[0].site.name, parameter, tuple(pieces), tuple(parameter.shape))


def save_peft_adapter(
    path: Path | str,
    models: Sequence[torch.nn.Module],
    model: HFConfig,
    groups: ProcessGroupCollection,
    config: LoraConfig,
    *,
    overwrite: bool = False,
) -> None:
    """Write the adapter as PEFT and vLLM load it: one A `[rank, in]` and B `[out, rank]` for each projection, each
    expert's under its own number (PEFT stacks them on loading, as transformers 5 does the experts themselves).

    A collective over all ranks; rank 0 writes. The folder appears whole or not at all; every rank then raises the same
    `UserError`.
    """
    exporter = adapter_exporter(models, model, groups, config)
    stream = exporter.stream()

    def write(folder: Path) -> None:
        with SafetensorsStream(folder / WEIGHTS, exporter.tensors) as writer:
            for name, tensor in stream:
                assert tensor is not None
                writer.write(name, tensor)
        write_synced(folder / CONFIG, json.dumps(_peft_config(model, config), indent=2) + "\n")
        write_checksums(folder, mark=CONFIG, known={WEIGHTS: writer.digest})

    on_first_rank(lambda: check_target(Path(path), overwrite=overwrite))
    write_on_first_rank(Path(path), stream, write, overwrite=overwrite)


def _peft_config(model: HFConfig, config: LoraConfig) -> dict[str, Any]:
    alpha = int(config.alpha) if config.alpha == int(config.alpha) else config.alpha
    tensors = {tensor for site in sites(model, config).values() for tensor in site.sources}
    modules = {tensor.removesuffix(".weight").rpartition(".")[2] for tensor in tensors}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model.path) if model.path else None,
        "r": config.rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(modules),
        "inference_mode": True,
        "init_lora_weights": True,
    }


def check_peft_adapter(folder: Path, model: HFConfig, config: LoraConfig) -> None:
    """`UserError` where the adapter in `folder` is not one for this model, rank, alpha and targets."""
    _AdapterFile(folder, model, config)


def load_peft_adapter(models: Sequence[torch.nn.Module], model: HFConfig, config: LoraConfig, folder: Path) -> None:
    """Fill the adapters of this rank's chunks from a PEFT folder. Each rank reads the blocks it holds; no collectives.

    Experts may be stored one by one (as `save_peft_adapter` does) or stacked as PEFT itself saves them. The latter with
    `rank` rows for gate and up together are one A for both: each gets a copy. `UserError` for anything that does not
    fit.
    """
    file = _AdapterFile(folder, model, config)
    with torch.no_grad():
        for owned in owned_adapters(models):
            for piece in owned.pieces:
                target = owned.parameter[tuple(slice(*span) for span in piece.local)]
                target.copy_(file.read(piece.hf_name, piece.source).reshape(target.shape))


class _AdapterFile:
    """The tensors of a checked adapter folder, by the name each projection's has."""

    def __init__(self, folder: Path, model: HFConfig, config: LoraConfig) -> None:
        self._file = folder / WEIGHTS
        if not (folder / CONFIG).is_file():  # checksums of a model's folder would be called damaged
            raise UserError(f"{folder} is no PEFT adapter: it has no {CONFIG}")
        require_unchanged(folder, mark=CONFIG)
        _check_config(folder / CONFIG, config)
        if not self._file.is_file():
            raise UserError(f"{folder} has no {WEIGHTS}; export the adapter as safetensors")
        with refuse_damaged(self._file):
            self._handle = safe_open(self._file, "pt")
            shapes = {name: tuple(self._handle.get_slice(name).get_shape()) for name in self._handle.keys()}  # noqa: SIM118
        expected = adapter_tensors(model, config)
        self._stacked = None
        if StackedExperts.stored(model, config, shapes):
            self._stacked = StackedExperts(self._handle, model, config, str(self._file))
            expected = self._stacked.shapes(expected, shapes)
        faults = {
            "lacks": [n for n in expected if n not in shapes],
            "has tensors of the wrong shape:": [n for n in expected if n in shapes and shapes[n] != expected[n]],
            "has unused tensors:": sorted(n for n in shapes if n not in expected),
        }
        settings = f"lora.rank={config.rank}, lora.targets={list(config.targets)}"
        refuse_tensors(self._file, faults, f"it does not fit {settings} and the model")

    def read(self, name: str, block: Block) -> torch.Tensor:
        found = self._stacked.find(name) if self._stacked else None
        source = self._handle.get_slice(name) if found is None else found
        return source[tuple(slice(*span) for span in block)]


def _check_config(file: Path, config: LoraConfig) -> None:
    described = read_json_object(file)
    if described.get("peft_type") != "LORA":
        raise UserError(f"{file}: peft_type is {described.get('peft_type')!r}, only 'LORA' is supported")
    for name, value in _WITHOUT_EFFECT.items():
        if described.get(name, value) not in (value, []):
            raise UserError(f"{file}: {name} is {described[name]!r}, only {value!r} is supported")
    for field, name, value in (("r", "rank", config.rank), ("lora_alpha", "alpha", config.alpha)):
        if described.get(field) != value:
            raise UserError(f"{file}: {field} is {described.get(field)!r}, lora.{name} is {value!r}; set them alike")
