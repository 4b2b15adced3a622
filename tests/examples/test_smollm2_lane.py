"""Runs one after another with one engine: each begins with its own weights, and nobody makes a run twice."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.smollm2.lane import run_lane
from examples.smollm2.plan import Job
from examples.tiny_moe_dppo.model import byte_tokenizer, random_tiny_qwen3_moe, write_checkpoint
from megatron_dppo.trainer.history import History

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    *("trainer.steps=2", "trainer.prompts_per_step=4", "trainer.samples_per_prompt=4", "trainer.checkpoint_every=0"),
    *("trainer.prompts_per_mini_batch=2", "trainer.parity_check=false", "trainer.export_hugging_face=false"),
    *("evaluation.every=0", "rollout.cpu_threads=1", "rollout.max_response_tokens=8"),
    *("rollout.max_prompt_tokens=256", "task.train_size=16", "task.held_out_size=4", "tracking.samples_every=0"),
    "task.rewards=[{kind: python, path: 'megatron_dppo.launch.example:coin'}]",
)
SCRIPT = """
import gc, sys, time
from pathlib import Path
from examples.smollm2.lane import run_lane
from examples.smollm2.plan import Job
from megatron_dppo.actor.actor import MegatronActor
from megatron_dppo.rollout.fleet.fleet import EngineFleet
out, model, *overrides = sys.argv[1:]
def job(rate):
    return Job(f"{rate}/seed-0", 0, (*overrides, f"optimizer.lr={rate}"), 1, model=Path(model))
jobs = [job(rate) for rate in ("none", "0.3", "0.2")]
status = run_lane(jobs, Path(out), time.monotonic() + 1e6)
kept = [one for one in gc.get_objects() if isinstance(one, (MegatronActor, EngineFleet))]
sys.exit(f"still there: {kept}" if kept else status)
"""


def two_runs(tmp_path: Path, engine: str, gap: float) -> None:
    """One run after another with `engine`, and one before them that fails. `gap`: of log-probabilities at most, in the
    mean, between trainer and engine with the same weights."""
    tokenizer = byte_tokenizer()
    write_checkpoint(tmp_path / "model", random_tiny_qwen3_moe(tokenizer, seed=1), tokenizer)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(tmp_path / "model"), *TINY, f"rollout.engine={engine}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, check=False)
    assert done.returncode == 1, f"{done.stdout}\n{done.stderr}"  # the first has a learning rate that is none
    assert done.stdout.count("failed") == 1
    assert "optimizer.lr" in (tmp_path / "none/seed-0.log").read_text()
    first, second = (History.read(tmp_path / f"{rate}/seed-0") for rate in ("0.3", "0.2"))
    assert first["policy/ratio_max"].values.max() > 1.2, "weights have to change, or nothing is tested"
    for run in (first, second):
        assert run["mismatch/abs_log_ratio_low"].values[0] < gap, "trainer and engine have different weights"
    assert list((tmp_path / "0.3/seed-0/logs").glob("*engine*"))
    assert not list((tmp_path / "0.2/seed-0/logs").glob("*engine*")), "the engine started again"


@pytest.mark.timeout(300)
def test_each_run_has_its_own_weights_and_all_have_one_engine(tmp_path: Path) -> None:
    two_runs(tmp_path, "reference", 1e-4)


def test_a_run_that_another_lane_has_is_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    job = Job("rates/seed-0", 0, ("no.such=1",), 1)
    (tmp_path / "rates").mkdir()
    with open(tmp_path / "rates/seed-0.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run_lane([job], tmp_path, 1e12) == 0
    assert not (tmp_path / "rates/seed-0.log").exists()
