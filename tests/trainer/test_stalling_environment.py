"""A run in whose environment one episode of 20 hangs: it goes on, and says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from examples.tiny_moe_dppo.model import byte_tokenizer
from megatron_dppo.tasks.build import build_task
from megatron_dppo.tasks.config import TaskConfig
from tests.tasks.environments.counting import Stalling
from tests.tiny import tiny_qwen3_moe

STEPS, PROMPTS, SAMPLES = 6, 10, 2
CONFIG = """
run: {{dir: {run}, seed: 3}}
model: {{path: {model}}}
actor: {{dtype: float32, max_tokens_per_microbatch: 2000}}
rollout: {{max_prompt_tokens: 400, max_response_tokens: 4, dtype: float32, kv_cache_mib: 64, max_num_seqs: 20}}
task:
  kind: environment
  environment: {{name: stalling, factory: "{module}:Stalling", parameters: {{hangs: {hangs}}}, step_timeout_s: 3}}
  train_size: 20
  held_out_size: 1
trainer: {{steps: 6, prompts_per_step: 10, samples_per_prompt: 2, prompts_per_mini_batch: 10,
  export_hugging_face: false}}
evaluation: {{every: 0}}
"""


@pytest.mark.full
def test_six_steps_in_an_environment_that_hangs_in_one_episode_of_twenty(tmp_path: Path) -> None:
    factory = f"{Stalling.__module__}:Stalling"
    environment = {"name": "stalling", "factory": factory}
    config = TaskConfig(kind="environment", environment=environment, train_size=20, held_out_size=1)
    seeds = [p.metadata["seed"] for p in build_task(config, byte_tokenizer(), max_prompt_tokens=400).prompts(0, 60)]
    tiny_qwen3_moe(tmp_path / "model", seed=4, max_position_embeddings=512, num_hidden_layers=2)
    file = tmp_path / "run.yaml"
    file.write_text(
        CONFIG.format(run=tmp_path / "run", model=tmp_path / "model", module=Stalling.__module__, hangs=[seeds[0]])
    )
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"),
        *("-m", "megatron_dppo.cli", "train", str(file)),
    ]
    root = str(Path(__file__).resolve().parents[2])
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=variables, cwd=root, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "optimizer/loss" in row]
    asked = np.array(seeds).reshape(STEPS, PROMPTS)
    hung = [SAMPLES * int((step == seeds[0]).sum()) for step in asked]
    assert sum(hung) * 20 == STEPS * PROMPTS * SAMPLES
    assert [row["reward/timeouts/environment"] for row in rows] == hung
    assert [row["reward/errors/environment"] for row in rows] == hung
    healthy = [(20 - count) / 20 * 2 + count / 20 for count in hung]  # 1 for each of two turns; the second hangs
    np.testing.assert_allclose([row["reward/mean"] for row in rows], healthy, rtol=1e-6)
    warning = "the environment failed in 2 of 20 episodes: killed after 3 s"
    log = [json.loads(line) for line in (tmp_path / "run/logs/rank-00000.jsonl").read_text().splitlines()]
    assert [line["message"] for line in log].count(warning) == sum(count > 0 for count in hung)
    assert done.stderr.count(warning) == sum(count > 0 for count in hung)
