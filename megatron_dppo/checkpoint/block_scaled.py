"""Weights published in 8 bits with a scale for each block of 128 x 128, read as the numbers that they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch

from megatron_dppo.checkpoint.hf_files import HFFiles, StoredTensor
from megatron_dppo.errors import UserError
from megatron_dppo.models.names import Block

SIDE = 128
_SCALE = "_scale_inv"


class BlockScaledFiles(HFFiles):
    """`HFFiles` whose 8-bit tensors are bfloat16:

        X[i, j] = bfloat16(float32(X8[i, j]) * X_scale_inv[i // 128, j // 128])

    X8 is e4m3 `[rows, columns]` and the scale float32 `[ceil(rows / 128), ceil(columns / 128)]`; the last block of a
    row or column may be partial. Scales are no tensors of the model. `UserError` names a tensor without its scale, a
    scale without its tensor, or one of another type or shape.
    """

    dtypes = HFFiles.dtypes | {"F8_E4M3": torch.float8_e4m3fn}
    described = f"8-bit weights with a scale for each block of {SIDE} x {SIDE}"
    scheme: ClassVar[dict[str, tuple[Any, ...]]] = {
        "fmt": ("e4m3", None),
        "weight_block_size": ([SIDE, SIDE],),
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
        scales = super().read(name + _SCALE, tuple((start // SIDE, -(-stop // SIDE)) for start, stop, *_ in block))
        for dim, (start, stop, *_) in enumerate(block):
            scales = scales.repeat_interleave(SIDE, dim).narrow(dim, start % SIDE, stop - start)
        return (super().read(name, block).float() * scales).bfloat16()
