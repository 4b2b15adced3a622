"""Checkpoints whose weights are stored in few bits, read as the numbers that they stand for: 8 bits with a scale for
each block, experts in 4 bits (MXFP4 of the OCP Microscaling formats). Which it is says config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from megatron_dppo.checkpoint.hf_files import HFFiles, StoredTensor
from megatron_dppo.errors import UserError
from megatron_dppo.json_object import read_json_object
from megatron_dppo.models.names import Block

FIELD = "quantization_config"
_NAMES_MODULES = ("modules_to_not_convert", "ignored_layers")
"""Whose weights are plain; the files say so too."""

_SIDE = 128
"""Rows and columns of a block with a scale of its own."""
_SCALE = "_scale_inv"

_GROUP = 32
"""Numbers of a scale in MXFP4."""
_BLOCKS, _SCALES = "_blocks", "_scales"
_NOT_A_NUMBER = 255
_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_VALUES = torch.cat([_VALUES, -_VALUES])
"""Of the 16 codes: a sign, two bits of exponent and one of mantissa."""


class BlockScaledFiles(HFFiles):
    """`HFFiles` whose 8-bit tensors are bfloat16:

        X[i, j] = bfloat16(float32(X8[i, j]) * X_scale_inv[i // 128, j // 128])

    X8 is e4m3 `[rows, columns]` and the scale float32 `[ceil(rows / 128), ceil(columns / 128)]`; the last block of a
    row or column may be partial. Scales are no tensors of the model. `UserError` names a tensor without its scale, a
    scale without its tensor, or one of another type or shape.
    """

    dtypes = HFFiles.dtypes | {"F8_E4M3": torch.float8_e4m3fn}
    described = f"8-bit weights with a scale for each block of {_SIDE} x {_SIDE}"
    scheme: ClassVar[dict[str, tuple[Any, ...]]] = {
        "fmt": ("e4m3", None),
        "weight_block_size": ([_SIDE, _SIDE],),
        "activation_scheme": ("dynamic", None),  # of a product in 8 bits, which there is none of here
        "scale_fmt": ("ue8m0", "float", None),  # a scale is a power of two, or any; it is stored as a number
    }
    """Fields of `quantization_config`, with what can be read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._scales: dict[str, StoredTensor] = {}
        for name, tensor in self._stored.items():
            if tensor.dtype is torch.float8_e4m3fn:
                self._scales[name] = self._scale_of(name, tensor, self._stored.get(name + _SCALE))
                self.tensors[name] = StoredTensor(tensor.file, tensor.shape, torch.bfloat16)
        for name in self._stored:
            weight = name.removesuffix(_SCALE)
            if weight != name:
                if weight not in self._scales:
                    file = self._stored[name].file
                    raise UserError(f"{file}: {name} belongs to no 8-bit tensor; fetch the folder again")
                del self.tensors[name]

    def _scale_of(self, name: str, tensor: StoredTensor, scale: StoredTensor | None) -> StoredTensor:
        if scale is None:
            raise UserError(f"{tensor.file}: {name} is stored in 8 bits without {name}{_SCALE}; fetch the folder again")
        blocks = tuple(-(-size // _SIDE) for size in tensor.shape)
        if len(tensor.shape) != 2 or scale.shape != blocks or scale.dtype is not torch.float32:
            raise UserError(
                f"{scale.file}: {name}{_SCALE} is {str(scale.dtype).removeprefix('torch.')} {scale.shape} for "
                f"{tensor.shape}; only float32 {blocks}, a scale for each block of {_SIDE} x {_SIDE}, can be read"
            )
        return scale

    def read(self, name: str, block: Block) -> torch.Tensor:
        """A copy of one block; bfloat16 where 8 bits are stored."""
        if name not in self._scales:
            return super().read(name, block)
        scales = super().read(name + _SCALE, tuple((start // _SIDE, -(-stop // _SIDE)) for start, stop, *_ in block))
        for dim, (start, stop, *_) in enumerate(block):
            scales = scales.repeat_interleave(_SIDE, dim).narrow(dim, start % _SIDE, stop - start)
        return (super().read(name, block).float() * scales).bfloat16()


class Mxfp4Files(HFFiles):
    """`HFFiles` whose 4-bit tensors are bfloat16, their outputs last as plain experts' are:

        X[e, 32 b + j, o] = value(code_j of X_blocks[e, o, b]) * 2 ** (X_scales[e, o, b] - 127)

    X_blocks is uint8 `[experts, outputs, inputs / 32, 16]`, two codes in a byte, the first in its low half, and
    X_scales uint8 `[experts, outputs, inputs / 32]`. `UserError` names blocks without scales, scales without blocks, a
    tensor of another type or shape, and a scale that is not a number (255).
    """

    dtypes = HFFiles.dtypes | {"U8": torch.uint8}
    described = f"4-bit experts with a scale for every {_GROUP} numbers"
    scheme: ClassVar[dict[str, tuple[Any, ...]]] = {"dequantize": (None, False, True)}  # when transformers loads them

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for name, tensor in self._stored.items():
            if name.endswith(_SCALES) and (plain := name.removesuffix(_SCALES)) + _BLOCKS not in self._stored:
                raise UserError(f"{tensor.file}: {name} belongs to no {plain}{_BLOCKS}; fetch the folder again")
            if name.endswith(_BLOCKS):
                plain = name.removesuffix(_BLOCKS)
                self.tensors[plain] = self._plain(plain, tensor, self._stored.get(plain + _SCALES))
                del self.tensors[name], self.tensors[plain + _SCALES]
        for name, tensor in self.tensors.items():
            if tensor.dtype is torch.uint8:
                raise UserError(f"{tensor.file}: {name} is stored as U8, and is no blocks or scales; fetch it again")

    def _plain(self, name: str, blocks: StoredTensor, scales: StoredTensor | None) -> StoredTensor:
        if scales is None:
            raise UserError(f"{blocks.file}: {name}{_BLOCKS} is without {name}{_SCALES}; fetch the folder again")
        if len(blocks.shape) != 4 or blocks.shape[3] != _GROUP // 2 or blocks.dtype is not torch.uint8:
            raise UserError(
                f"{blocks.file}: {name}{_BLOCKS} is {str(blocks.dtype).removeprefix('torch.')} {blocks.shape}; only "
                f"uint8 (experts, outputs, inputs / {_GROUP}, {_GROUP // 2}) can be read"
            )
        if scales.shape != blocks.shape[:3] or scales.dtype is not torch.uint8:
            raise UserError(
                f"{scales.file}: {name}{_SCALES} is {str(scales.dtype).removeprefix('torch.')} {scales.shape} for "
                f"blocks {blocks.shape}; only uint8 {blocks.shape[:3]} can be read"
            )
        experts, outputs, groups = scales.shape
        return StoredTensor(blocks.file, (experts, groups * _GROUP, outputs), torch.bfloat16)

    def read(self, name: str, block: Block) -> torch.Tensor:
        """A copy of one block; bfloat16 where 4 bits are stored."""
        if name in self._stored:
            return super().read(name, block)
        experts, (start, stop, *step), outputs = block
        first, last = start // _GROUP, -(-stop // _GROUP)
        packed = super().read(name + _BLOCKS, (experts, outputs, (first, last), (0, _GROUP // 2)))
        scales = super().read(name + _SCALES, (experts, outputs, (first, last)))
        if (scales == _NOT_A_NUMBER).any():
            raise UserError(f"{self._stored[name + _SCALES].file}: {name}{_SCALES} has one that is not a number (255)")
        codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
        values = torch.ldexp(_VALUES[codes.int()], scales[..., None].int() - 127)
        inputs = slice(start - first * _GROUP, stop - first * _GROUP, *step)
        return values.flatten(-2)[..., inputs].transpose(1, 2).bfloat16()


_READERS: dict[str, type[BlockScaledFiles | Mxfp4Files]] = {"fp8": BlockScaledFiles, "mxfp4": Mxfp4Files}


def is_quantized(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json says that its weights are not plain."""
    return bool(raw.get(FIELD))


def reader(raw: Mapping[str, Any], where: Path) -> type[HFFiles]:
    """What reads the weights of a quantised folder; `UserError` names what of the scheme `where` is not known."""
    scheme = raw[FIELD]
    if not isinstance(scheme, dict):
        raise UserError(f"{where}: {FIELD} is {scheme!r:.80}, it must be an object")
    method = scheme.get("quant_method")
    found = _READERS.get(method) if isinstance(method, str) else None
    if found is None:
        known = " and ".join(f"{name} ({one.described})" for name, one in _READERS.items())
        raise UserError(
            f"{where}: {FIELD}.quant_method is {method!r:.80}, only {known} can be read; fetch the model's plain "
            "weights"
        )
    for name, values in found.scheme.items():
        if (value := scheme.get(name)) not in values:
            raise UserError(
                f"{where}: {FIELD}.{name} is {value!r:.80}, only {values[0]!r} can be read ({found.described}); fetch "
                "the model's plain weights"
            )
    if unknown := sorted(set(scheme) - {"quant_method", *found.scheme, *_NAMES_MODULES}):
        raise UserError(f"{where}: {FIELD}.{unknown[0]} is not known; fetch the model's plain weights")
    return found


def open_files(folder: Path) -> HFFiles:
    """The weights of a folder, plain or in few bits, as its config.json says."""
    raw = read_json_object(folder / "config.json") if (folder / "config.json").is_file() else {}
    return reader(raw, folder / "config.json")(folder) if is_quantized(raw) else HFFiles(folder)
