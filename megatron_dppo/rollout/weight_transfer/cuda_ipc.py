"""Device memory of one process, opened by another one on the same GPU."""

from __future__ import annotations

import inspect
import os
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from megatron_dppo.errors import UserError
from megatron_dppo.rollout.weight_transfer.turns import Emptying


def check_allocator() -> None:
    """UserError where torch's allocator is set to expandable segments, whose memory CUDA's IPC cannot share (and which
    vLLM's sleep mode does not work with)."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(name, "").lower().replace(" ", ""):
            raise UserError(
                f"{name}={os.environ[name]}: trainer and engine share GPUs (rollout.placement=colocated), and memory "
                "of expandable segments can neither be shared between processes by CUDA IPC nor be given back by a "
                "sleeping engine; remove expandable_segments:True"
            )


def gpu_uuid(device: torch.device) -> str:
    """UUID of the GPU behind a device, the same in every process whatever it sees."""
    return str(torch.cuda.get_device_properties(device).uuid)


@dataclass(frozen=True)
class Shared:
    """What another process needs to open buffers of this one (`open_shared`), which must outlive its use of them."""

    buffers: list[Any]
    """Arguments of torch's `rebuild_cuda_tensor`."""
    turns: str
    """Path of the turns in which they are used."""
    timeout_s: float
    """For each turn."""


def share(buffers: list[torch.Tensor], turns: str, timeout_s: float) -> Shared:
    """CUDA tensors for a process on the same GPU."""
    return Shared([reduce_tensor(buffer)[1] for buffer in buffers], turns, timeout_s)


def take_back(shared: Shared) -> None:
    """Let go of what `share` returned, once nobody opens it any more. To be called by the process that shared.

    torch frees shared memory when a process has closed it, and cannot be told that none will come: an engine that is
    down, or is not among those of this sync, would cost the GPU its buffers for good. So this process closes what
    nobody did. Not what was closed: the count has no sign, and one below zero would keep the memory as well.
    """
    for arguments in shared.buffers:
        named = inspect.signature(rebuild_cuda_tensor).bind(*arguments).arguments
        counter = named["ref_counter_handle"], named["ref_counter_offset"]
        if _open(*counter):
            torch.UntypedStorage._release_ipc_counter_cuda(*counter)


def _open(handle: bytes, offset: int) -> bool:
    """Whether a counter of torch's (`CudaIPCRefCountersFile`: int64 numbers behind the 64 bytes with which
    `RefcountedMapAllocator` begins a file) says that somebody has yet to close."""
    with Path("/dev/shm", handle.decode().lstrip("/")).open("rb") as file:
        file.seek(64 + 8 * offset)
        return int.from_bytes(file.read(8), sys.byteorder, signed=True) > 0


def open_shared(handles: dict[str, bytes], device: torch.device) -> tuple[list[torch.Tensor], Emptying]:
    """The buffers that the process on `device`'s own GPU shared, and this end of the turns; handles are pickled
    `Shared`s by GPU."""
    mine = handles.get(gpu_uuid(device))
    if mine is None:
        raise RuntimeError(f"no trainer rank shares buffers on this worker's GPU, {gpu_uuid(device)}: {list(handles)}")
    shared: Shared = pickle.loads(mine)
    opened = []
    for arguments in shared.buffers:
        rebuilt: list[Any] = list(arguments)
        rebuilt[6] = device.index  # the sender's number of the GPU need not be ours
        opened.append(rebuild_cuda_tensor(*rebuilt))
    return opened, Emptying(shared.turns, shared.timeout_s)  # last: from here on the rank waits for this worker
