"""Anonymous memory that another process of this machine can open by path."""

from __future__ import annotations

import os

import numpy as np
import torch


class MemorySegment:
    """One memory file, written by this process and read by others of the same user while it is open.

    It has no name in /dev/shm, so it does not count against that mount's size (64 MiB in many containers) and is gone
    with the process, however it ends. Linux only, as vLLM is.
    """

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("megatron-dppo-weights")

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def write(self, payload: np.ndarray) -> None:
        """Replace the content by `payload` (uint8, contiguous)."""
        view, written = memoryview(payload), 0
        os.ftruncate(self._descriptor, len(view))
        while written < len(view):
            written += os.pwrite(self._descriptor, view[written:], written)

    def close(self) -> None:
        os.close(self._descriptor)


def read_segment(path: str, size: int) -> torch.Tensor:
    """The `size` bytes in the segment at `path`, as uint8 of this process's own."""
    payload = torch.empty(size, dtype=torch.uint8)
    with open(path, "rb", buffering=0) as segment:
        view, received = memoryview(payload.numpy()), 0
        while received < size:
            count = segment.readinto(view[received:])
            if not count:
                raise RuntimeError(f"weight bucket ends after {received} of {size} bytes")
            received += count
    return payload
