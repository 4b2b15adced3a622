"""Buffers that a colocated sync shares, and that an engine opens or not (on GPUs: tests/gpu/test_cuda_ipc.py)."""

from __future__ import annotations

import inspect

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from megatron_dppo.rollout.weight_transfer.cuda_ipc import Shared, take_back

COUNTERS = 10_000
"""References that torch counts in one file of shared memory (`CUDA_IPC_REF_COUNTER_FILE_SIZE`)."""


def test_the_sender_closes_what_no_reader_did() -> None:
    """torch's own counters, in shared memory as it lays them out: those of unopened buffers go down, no other one, and
    that of a buffer that its reader has closed not below zero: torch takes the number for one without a sign."""
    storage = torch.ones(COUNTERS, dtype=torch.int64).untyped_storage()
    _, file, _ = storage._share_filename_cpu_()
    counters = torch.empty(0, dtype=torch.int64).set_(storage)
    counters[5] = 0
    names = inspect.signature(rebuild_cuda_tensor).parameters
    handles = [{"ref_counter_handle": file, "ref_counter_offset": offset} for offset in (3, 5, 7)]
    take_back(Shared([tuple(handle.get(name) for name in names) for handle in handles], turns="", timeout_s=1.0))
    assert (counters == 0).nonzero().flatten().tolist() == [3, 5, 7]
    assert int(counters.sum()) == COUNTERS - 3
