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
from examples.smollm2.share import GpuShare
from examples.tiny_moe_dppo.model import byte_tokenizer, random_tiny_qwen3_moe, write_checkpoint
from megatron_dppo.trainer.history import History

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    *("trainer.steps=2", "trainer.prompts_per_step=4", "trainer.samples_per_prompt=4", "trainer.checkpoint_every=0"),
    *("trainer.prompts_per_mini_batch=2", "trainer.parity_check=false", "trainer.export_hugging_face=false"),
    *("evaluation.every=0", "rollout.cpu_threads=1", "rollout.max_response_tokens=8", "rollout.enforce_eager=true"),
    *("rollout.max_prompt_tokens=256", "task.train_size=16", "task.held_out_size=4", "tracking.samples_every=0"),
    "task.rewards=[{kind: python, path: 'megatron_dppo.launch.example:coin'}]",
)
SCRIPT = """
import gc, os, signal, sys, threading, time
from pathlib import Path
import psutil
from examples.smollm2.lane import run_lane
from examples.smollm2.plan import Job
from examples.smollm2.share import GpuShare
from megatron_dppo.actor.actor import MegatronActor
from megatron_dppo.rollout.fleet.fleet import EngineFleet
from tests.processes import command_of
out, model, fails, *overrides = sys.argv[1:]
def job(name, *more):
    return Job(f"{name}/seed-0", 0, (*overrides, *more), 1, model=Path(model))
def engines():
    return [one for one in psutil.Process().children(recursive=True) if "EngineHost" in command_of(one)]
def terminate(metrics):  # in the first step, which is the last one: the evaluation before it is written down
    while not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGTERM)
def jobs():
    yield job("none", "optimizer.lr=none")
    yield job("0.3", "optimizer.lr=0.3")
    yield job("0.2", "optimizer.lr=0.2")
    if not fails:
        return
    (engine,) = engines()
    engine.kill()
    yield job("fails", fails)
    assert not engines(), "an engine is there after an error"
    threading.Thread(target=terminate, args=(Path(out) / "signalled/seed-0/metrics.jsonl",)).start()
    yield job("signalled", "trainer.steps=1", "evaluation.every=1", "evaluation.prompts=4")
    yield job("never")
started = time.monotonic()
status = run_lane(jobs(), Path(out), started + 1e6, GpuShare(Path(out) / "gib", 1))
kept = [one for one in gc.get_objects() if isinstance(one, (MegatronActor, EngineFleet))]
print("still there:", kept)
sys.exit(3 if kept else status)
"""


def lane_of_runs(tmp_path: Path, engine: str, gap: float, *, fails: str = "") -> None:
    """Runs one after another with `engine`.

    gap    of log-probabilities at most, in the mean, between trainer and engine with the same weights
    fails  override of a run that fails when its engines have answered: then there is one, first with an engine that
           is dead, and after it one that is signalled in its last step
    """
    tokenizer = byte_tokenizer()
    write_checkpoint(tmp_path / "model", random_tiny_qwen3_moe(tokenizer, seed=1), tokenizer)
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    settings = [fails, *TINY, f"rollout.engine={engine}", "rollout.max_engine_failures=0"]
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(tmp_path / "model"), *settings]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment, check=False)
    said = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 1, said  # of these runs some are to fail; 3: what a run had is still there
    failed = [line.split()[2] for line in done.stdout.splitlines() if " failed: " in line]
    assert failed == [f"{name}/seed-0" for name in (("none", "fails", "fails") if fails else ("none",))], said
    assert "optimizer.lr" in (tmp_path / "none/seed-0.log").read_text()
    first, second = (History.read(tmp_path / f"{rate}/seed-0") for rate in ("0.3", "0.2"))
    assert first["policy/ratio_max"].values.max() > 1.2, "weights have to change, or nothing is tested"
    for run in (first, second):
        assert run["mismatch/abs_log_ratio_low"].values[0] < gap, "trainer and engine have different weights"
    assert list((tmp_path / "0.3/seed-0/logs").glob("*engine*"))
    assert not list((tmp_path / "0.2/seed-0/logs").glob("*engine*")), "the engine started again"


def test_each_run_has_its_own_weights_and_all_have_one_engine(tmp_path: Path) -> None:
    lane_of_runs(tmp_path, "reference", 1e-4, fails="task.rewards=[{kind: python, path: 'json:loads'}]")
    said = (tmp_path / "fails/seed-0.log").read_text()
    dead, own = said.find("rollout.max_engine_failures=0 are allowed"), said.find("failed on all 16 responses")
    assert 0 < dead < own, "not tried with engines of its own"
    assert len(History.read(tmp_path / "signalled/seed-0")["reward/mean"]) == 1
    assert not (tmp_path / "never/seed-0.log").exists(), "the lane went on after a signal"


def test_a_run_that_another_lane_has_is_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    job = Job("rates/seed-0", 0, ("no.such=1",), 1)
    (tmp_path / "rates").mkdir()
    with open(tmp_path / "rates/seed-0.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run_lane([job], tmp_path, 1e12, GpuShare(tmp_path / "gib", 1)) == 0
    assert not (tmp_path / "rates/seed-0.log").exists()
