"""Runs one after another with one vLLM on the trainer's GPU: each shares buffers of its own with it (CUDA IPC)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.examples.test_smollm2_lane import lane_of_runs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.timeout(300)
def test_each_run_has_its_own_weights_and_all_have_one_vllm(tmp_path: Path) -> None:
    lane_of_runs(tmp_path, "vllm", 0.1)
