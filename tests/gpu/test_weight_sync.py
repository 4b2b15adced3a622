"""The weights that the ranks send are the weights that the engine samples from, over CUDA IPC and NCCL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "rollout.enforce_eager=true",
    "rollout.gpu_memory_utilization=0.2",
    "rollout.kv_cache_mib=4096",
    "rollout.max_prompt_tokens=256",
    "rollout.max_response_tokens=32",
    "rollout.max_num_seqs=64",
    "rollout.max_num_batched_tokens=2048",
    "trainer.steps=2",
    "trainer.prompts_per_step=8",
    "trainer.samples_per_prompt=4",
    "trainer.prompts_per_mini_batch=4",
    "actor.recompute=none",
)


def needs(devices: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        torch.cuda.device_count() < devices,
        reason=f"needs {devices} CUDA devices, TransformerEngine and vLLM",
    )


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("placement", "ranks", "engine"),
    [
        pytest.param("colocated", 1, (), marks=needs(1), id="one GPU in turns"),
        pytest.param("colocated", 1, ("rollout.enable_sleep=false",), marks=needs(1), id="one GPU for both"),
        pytest.param("colocated", 2, (), marks=needs(2), id="colocated"),
        pytest.param("fleet", 1, (), marks=needs(2), id="fleet"),
        pytest.param(
            "colocated",
            2,
            ("rollout.tensor_parallel=2", "rollout.expert_parallel=true"),
            marks=needs(2),
            id="colocated, experts divided",
        ),
    ],
)
def test_random_weights_arrive(tmp_path: Path, placement: str, ranks: int, engine: tuple[str, ...]) -> None:
    """The engine starts from other random weights: its first rollout agrees with the trainer only after a sync."""
    environment = os.environ | {
        "PYTHON": sys.executable,
        "NPROC": str(ranks),
        "MODEL_DIR": str(tmp_path / "shapes"),
        "RUN_DIR": str(tmp_path / "run"),
    }
    script = ["bash", str(ROOT / "examples/run_qwen3_moe_dppo.sh"), "--random-weights", "--layers", "1"]
    done = subprocess.run(
        [*script, *SMALL, f"rollout.placement={placement}", *engine],
        check=False,
        capture_output=True,
        text=True,
        timeout=400,
        env=environment,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert rows[0]["parity/max_abs_logp_gap"] < 0.1  # two sets of weights would be several nats apart
    steps = [row for row in rows if "sync/bytes" in row]
    assert len(steps) == 2
    assert steps[0]["sync/bytes"] == steps[1]["sync/bytes"] > 2e9
