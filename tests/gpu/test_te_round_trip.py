"""On a GPU with TransformerEngine: exact weights in and out, logits as good as transformers' own in bf16."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device with 40 GB and TransformerEngine")
def test_grouped_experts_round_trip(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu.te_round_trip", str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=500)
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["tensors"] == 4 * (128 * 3 + 9) + 3
    assert found["megatron_error"] <= 1.2 * found["transformers_error"]
