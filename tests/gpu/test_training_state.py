"""On GPUs with TransformerEngine: a saved training state loads bit for bit, and training goes on the same way."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_step_after_loading_is_the_same(ranks: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices and TransformerEngine")
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={ranks}"]
    command += ["--master-addr=127.0.0.1", "--master-port=29533", "-m", "tests.gpu.training_state", str(tmp_path)]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["device"] == "cuda"
    assert found["moved"]
    assert found["ranks"] == [{"step": 3, "loaded": True, "next_step": True}] * ranks
