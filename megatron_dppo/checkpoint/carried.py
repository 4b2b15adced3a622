"""Tensors that a checkpoint holds beside those of its model: layers that predict further tokens. They are not trained,
and pass from one Hugging Face folder to the next as they are, whatever happened between (a training state keeps them in
a file of its own)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_dppo.checkpoint.hf_export import ExportedTensor
from megatron_dppo.checkpoint.hf_files import INDEX, SINGLE, HFFiles
from megatron_dppo.checkpoint.quantized import open_files
from megatron_dppo.checkpoint.safetensors_stream import SafetensorsStream
from megatron_dppo.models.hf_config import HFConfig

FILE = "carried.safetensors"
"""In the `hf/` of a training state, which has no other weights there."""


@dataclass(frozen=True)
class Carried:
    """What a folder holds beside the model, each tensor in its own type."""

    tensors: tuple[ExportedTensor, ...] = ()
    files: HFFiles | None = None

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor in the order of `tensors`, read as it is asked for."""
        for tensor in self.tensors:
            assert self.files is not None
            yield tensor.name, self.files.read(tensor.name, tuple((0, size) for size in tensor.shape))
        if self.files is not None:
            self.files.close()


def carried(model: HFConfig, folder: Path | None) -> Carried:
    """What `folder` holds; nothing where the model has no such layers or the folder no weights."""
    if folder is None or not (model.mtp_layers or model.family.carried):
        return Carried()
    if (folder / FILE).is_file():
        files = HFFiles(folder, only=FILE)
    elif (folder / INDEX).is_file() or (folder / SINGLE).is_file():
        files = open_files(folder)
    else:
        return Carried()
    found = [ExportedTensor(name, one.shape, one.dtype) for name, one in files.tensors.items() if model.carries(name)]
    return Carried(tuple(sorted(found, key=lambda tensor: tensor.name)), files)


def keep_carried(model: HFConfig, source: Path, target: Path) -> None:
    """Write what `source` holds beside the model to `target/carried.safetensors`, if it is anything."""
    found = carried(model, source)
    if found.tensors:
        with SafetensorsStream(target / FILE, found.tensors) as writer:
            for name, tensor in found.stream():
                writer.write(name, tensor)
