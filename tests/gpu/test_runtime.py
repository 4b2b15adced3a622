"""A run in a process that had one before."""

from __future__ import annotations

import os

import pytest
import torch

from megatron_dppo.actor import runtime
from megatron_dppo.models.parallel import ParallelConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_its_peak_of_memory_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    monkeypatch.setattr(os, "environ", os.environ | ranks)
    before = torch.cuda.memory_allocated()
    large = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    del large
    assert torch.cuda.max_memory_allocated() >= before + 2**30
    try:
        runtime.start(ParallelConfig(), seed=0, timeout_minutes=1)
        assert torch.cuda.max_memory_allocated() < before + 2**29
    finally:
        runtime.stop()
