"""Experts published in 4 bits (MXFP4 of the OCP Microscaling formats), read as the numbers that they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch

from megatron_dppo.checkpoint.hf_files import HFFiles, StoredTensor
from megatron_dppo.errors import UserError
from megatron_dppo.models.names import Block

SIDE = 32
"""Numbers of a scale."""
_BLOCKS, _SCALES = "_blocks", "_scales"
_NOT_A_NUMBER = 255
_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_VALUES = torch.cat([_VALUES, -_VALUES])
"""Of the 16 codes: a sign, two bits of exponent and one of mantissa."""


class Mxfp4Files(HFFiles):
    """`HFFiles` whose 4-bit tensors are bfloat16, their outputs last as plain experts' are:

        X[e, 32 b + j, o] = value(code_j of X_blocks[e, o, b]) * 2 ** (X_scales[e, o, b] - 127)

    X_blocks is uint8 `[experts, outputs, inputs / 32, 16]`, two codes in a byte, the first in its low half, and
    X_scales uint8 `[experts, outputs, inputs / 32]`. `UserError` names blocks without scales, scales without blocks, a
    tensor of another type or shape, and a scale that is not a number (255).
    """

    dtypes = HFFiles.dtypes | {"U8": torch.uint8}
    described = f"4-bit experts with a scale for every {SIDE} numbers"
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
        if len(blocks.shape) != 4 or blocks.shape[3] != SIDE // 2 or blocks.dtype is not torch.uint8:
            raise UserError(
                f"{blocks.file}: {name}{_BLOCKS} is {str(blocks.dtype).removeprefix('torch.')} {blocks.shape}; only "
                f"uint8 (experts, outputs, inputs / {SIDE}, {SIDE // 2}) can be read"
            )
        if scales.shape != blocks.shape[:3] or scales.dtype is not torch.uint8:
            raise UserError(
                f"{scales.file}: {name}{_SCALES} is {str(scales.dtype).removeprefix('torch.')} {scales.shape} for "
                f"blocks {blocks.shape}; only uint8 {blocks.shape[:3]} can be read"
            )
        experts, outputs, groups = scales.shape
        return StoredTensor(blocks.file, (experts, groups * SIDE, outputs), torch.bfloat16)

    def read(self, name: str, block: Block) -> torch.Tensor:
        """A copy of one block; bfloat16 where 4 bits are stored."""
        if name in self._stored:
            return super().read(name, block)
        experts, (start, stop, *step), outputs = block
        first, last = start // SIDE, -(-stop // SIDE)
        packed = super().read(name + _BLOCKS, (experts, outputs, (first, last), (0, SIDE // 2)))
        scales = super().read(name + _SCALES, (experts, outputs, (first, last)))
        if (scales == _NOT_A_NUMBER).any():
            raise UserError(f"{self._stored[name + _SCALES].file}: {name}{_SCALES} has one that is not a number (255)")
        codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
        values = torch.ldexp(_VALUES[codes.int()], scales[..., None].int() - 127)
        inputs = slice(start - first * SIDE, stop - first * SIDE, *step)
        return values.flatten(-2)[..., inputs].transpose(1, 2).bfloat16()
