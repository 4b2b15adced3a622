"""Adapters on TransformerEngine's layers against the dense model they are merged into."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def agreement(folder: Path, *options: str) -> dict:
    """`tools/bench_lora.py`'s check of adapters, in a process of its own."""
    command = [sys.executable, "tools/bench_lora.py", "--trial", "agreement", "--layers", "2"]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29617"}
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
    environment = os.environ | alone | {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}
    command += ["--out", str(folder), *options]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (found,) = folder.glob("*.json")
    return json.loads(found.read_text())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_adapters_equal_the_merged_model(tmp_path: Path) -> None:
    found = agreement(tmp_path)
    assert "OneLaunchTEColumnParallelGroupedLinear" in found["layer_types"]
    assert len(found["grouped"]) == 2
    assert found["agrees"], found


def test_the_check_itself_on_plain_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # plain layers are those of a CPU
    found = agreement(tmp_path, "--tiny")
    assert found["agrees"], found
    assert found["logp_effect"] > 0.1
