"""Write safetensors files tensor by tensor (the library's writer wants all tensors of a file in memory at once)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch

from megatron_dppo.checkpoint.checksums import ChecksummedFile
from megatron_dppo.checkpoint.hf_export import ExportedTensor

_STORED = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class SafetensorsStream:
    """One file: 8 bytes of header length (little endian), a JSON header, then the tensors' bytes in the header's order.

    Used as a context manager; `write` takes the tensors in the order given, and leaving early leaves a file that
    readers refuse, since it is shorter than its header says.
    """

    def __init__(self, path: Path, tensors: Sequence[ExportedTensor]) -> None:
        self._path, self._tensors = path, list(tensors)
        self._file: ChecksummedFile | None = None
        self._next = 0
        self._left = 0
        """Bytes that the next tensor still lacks, once some are written."""

    def __enter__(self) -> Self:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for tensor in self._tensors:
            end = offset + tensor.nbytes
            header[tensor.name] = {
                "dtype": _STORED[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [offset, end],
            }
            offset = end
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)  # readers map the data, which should be aligned
        self._file = ChecksummedFile(self._path)
        self._file.write(len(encoded).to_bytes(8, "little") + encoded)
        return self

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """All of a tensor, or the next rows of it."""
        expected = self._tensors[self._next]
        self._left = self._left or expected.nbytes
        whole = tuple(tensor.shape) == expected.shape or len(tensor.shape) < len(expected.shape)
        if (name, tensor.dtype, whole) != (expected.name, expected.dtype, True) or tensor.nbytes > self._left:
            raise ValueError(f"expected {expected}, got {name} {tuple(tensor.shape)} {tensor.dtype}")
        assert self._file is not None
        self._file.write(memoryview(tensor.detach().cpu().contiguous().view(torch.uint8).reshape(-1).numpy()))
        self._left -= tensor.nbytes
        self._next += self._left == 0

    @property
    def digest(self) -> str:
        """Checksum of the file, once it is closed."""
        assert self._file is not None
        return self._file.digest

    def __exit__(self, kind: object, *rest: object) -> None:
        assert self._file is not None
        complete = self._next == len(self._tensors)
        self._file.close()
        if kind is None and not complete:
            raise ValueError(f"{self._path}: {len(self._tensors) - self._next} tensors were never written")
