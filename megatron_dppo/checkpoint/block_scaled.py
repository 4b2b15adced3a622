"""Weights published in 8 bits with a scale for each block of 128 x 128, read as the numbers that they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_dppo.checkpoint.hf_files import HFFiles, StoredTensor
from megatron_dppo.errors import UserError
from megatron_dppo.json_object import read_json_object
from megatron_dppo.models.names import Block

FIELD = "quantization_config"
SIDE = 128
_SCALE = "_scale_inv"
_KNOWN: dict[str, tuple[Any, ...]] = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3", None),
    "weight_block_size": ([SIDE, SIDE],),
    "activation_scheme": ("dynamic", None),  # of a product in 8 bits, which there is none of here
    "scale_fmt": ("ue8m0", "float", None),  # a scale is a power of two, or any; it is stored as a number
}
_NAMES_MODULES = ("modules_to_not_convert", "ignored_layers")
"""Whose weights are plain; the files say so too."""


def is_quantized(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json says that its weights are not plain."""
    return bool(raw.get(FIELD))


def check_scheme(raw: Mapping[str, Any], where: Path) -> None:
    """`UserError` for any other scheme than this module's."""
    scheme = raw[FIELD]
    if not isinstance(scheme, dict):
        raise UserError(f"{where}: {FIELD} is {scheme!r:.80}, it must be an object")
    for name, known in _KNOWN.items():
        if (value := scheme.get(name)) not in known:
            raise UserError(
                f"{where}: {FIELD}.{name} is {value!r:.80}, only {known[0]!r} can be read (8-bit weights with a scale "
                f"for each block of {SIDE} x {SIDE}); fetch the model's plain weights"
            )
    if unknown := sorted(set(scheme) - set(_KNOWN) - set(_NAMES_MODULES)):
        raise UserError(f"{where}: {FIELD}.{unknown[0]} is not known; fetch the model's plain weights")


class BlockScaledFiles(HFFiles):
    """`HFFiles` whose 8-bit tensors are bfloat16:

        X[i, j] = bfloat16(float32(X8[i, j]) * X_scale_inv[i // 128, j // 128])

    X8 is e4m3 `[rows, columns]` and the scale float32 `[ceil(rows / 128), ceil(columns / 128)]`; the last block of a
    row or column may be partial. Scales are no tensors of the model. `UserError` names a tensor without its scale, a
    scale without its tensor, or one of another type or shape.
    """

    dtypes = HFFiles.dtypes | {"F8_E4M3": torch.float8_e4m3fn}

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._scales: dict[str, StoredTensor] = {}
        stored = dict(self.tensors)
        for name, tensor in stored.items():
            if tensor.dtype is torch.float8_e4m3fn:
                self._scales[name] = self._scale_of(name, tensor, stored.get(name + _SCALE))
                self.tensors[name] = StoredTensor(tensor.file, tensor.shape, torch.bfloat16)
        for name in stored:
            weight = name.removesuffix(_SCALE)
            if weight != name:
                if weight not in self._scales:
                    raise UserError(f"{stored[name].file}: {name} belongs to no 8-bit tensor; fetch the folder again")
                del self.tensors[name]
        self._stored = stored

    def _scale_of(self, name: str, tensor: StoredTensor, scale: StoredTensor | None) -> StoredTensor:
        if scale is None:
            raise UserError(f"{tensor.file}: {name} is stored in 8 bits without {name}{_SCALE}; fetch the folder again")
        blocks = tuple(-(-size // SIDE) for size in tensor.shape)
        if len(tensor.shape) != 2 or scale.shape != blocks or scale.dtype is not torch.float32:
            raise UserError(
                f"{scale.file}: {name}{_SCALE} is {str(scale.dtype).removeprefix('torch.')} {scale.shape} for "
                f"{tensor.shape}; only float32 {blocks}, a scale for each block of {SIDE} x {SIDE}, can be read"
            )
        return scale

    def read(self, name: str, block: Block) -> torch.Tensor:
        """A copy of one block; bfloat16 where 8 bits are stored."""
        if name not in self._scales:
            return super().read(name, block)
        scales = super().read(name + _SCALE, tuple((start // SIDE, -(-stop // SIDE)) for start, stop in block))
        for dim, (start, stop) in enumerate(block):
            scales = scales.repeat_interleave(SIDE, dim).narrow(dim, start % SIDE, stop - start)
        return (super().read(name, block).float() * scales).bfloat16()

    def _where(self, name: str) -> StoredTensor:
        return self._stored[name]


def open_files(folder: Path) -> HFFiles:
    """The weights of a folder, plain or in 8 bits, as its config.json says."""
    raw = read_json_object(folder / "config.json") if (folder / "config.json").is_file() else {}
    return BlockScaledFiles(folder) if is_quantized(raw) else HFFiles(folder)
