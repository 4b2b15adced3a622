"""An engine starts in a process that has looked at the GPUs already, as `doctor` and `evaluate` may have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.tiny import tiny_qwen3_moe

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
from pathlib import Path
import torch
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.start import open_engine

if __name__ == "__main__":
    assert torch.cuda.is_available()  # counts the GPUs, after which a fork of this process cannot use them
    options = {"max_prompt_tokens": 32, "max_response_tokens": 8, "max_num_seqs": 4, "enforce_eager": True}
    engine = open_engine(Path(sys.argv[1]), RolloutConfig(**options, gpu_memory_utilization=0.1, kv_cache_mib=256))
    engine.close()
    print("started")
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device and vLLM")
def test_gpus_were_counted_before(tmp_path: Path) -> None:
    tiny_qwen3_moe(str(tmp_path / "model"), seed=3, head_dim=64)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), str(tmp_path / "model")]
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment, cwd=ROOT, check=False)
    assert "started" in done.stdout, done.stderr[-4000:]
