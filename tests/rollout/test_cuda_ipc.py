"""Buffers that a colocated sync shares, and that an engine opens or not (on GPUs: tests/gpu/test_cuda_ipc.py)."""

from __future__ import annotations

import inspect
import pickle

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from megatron_dppo.rollout.weight_transfer import cuda_ipc
from megatron_dppo.rollout.weight_transfer.cuda_ipc import Shared, open_shared, take_back
from megatron_dppo.rollout.weight_transfer.turns import Filling

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


def test_a_worker_that_cannot_open_the_buffers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the rank would fill two of them, and wait for its time limit."""
    monkeypatch.setattr(cuda_ipc, "gpu_uuid", lambda device: "gpu")
    turns = Filling(2, timeout_s=60.0)
    names = inspect.signature(rebuild_cuda_tensor).parameters
    unknown = dict.fromkeys(names) | {
        "storage_cls": torch.UntypedStorage,
        "storage_handle": b"0",
        "storage_offset_bytes": 0,
    }
    shared = Shared([tuple(unknown[name] for name in names)], turns.path, 60.0)
    with pytest.raises((RuntimeError, AssertionError, TypeError), match=r"CUDA|NVIDIA|_new_shared_cuda"):
        open_shared({"gpu": pickle.dumps(shared)}, torch.device("cuda", 0))
    assert not turns.attended
