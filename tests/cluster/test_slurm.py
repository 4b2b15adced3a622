"""docker/slurm/train.sbatch run by a real Slurm: two nodes, a preemption in the middle, the resume after it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from examples.tiny_moe_dppo.model import byte_tokenizer, random_tiny_qwen3_moe, write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
SETUP = ROOT / "tests/cluster/setup_slurm.sh"
STEPS = 10
CONFIG = """
run: {{dir: unused, name: slurm, seed: 3}}
model: {{path: {model}}}
parallel: {{tensor: 2, expert: 2, sequence_parallel: true}}
actor: {{dtype: float32, max_tokens_per_microbatch: 512}}
rollout: {{max_prompt_tokens: 32, max_response_tokens: 8, dtype: float32, kv_cache_mib: 64, max_num_seqs: 64}}
task:
  parameters: {{min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}}
  prompt: "{{metadata[expression]}}"
  train_size: 64
  held_out_size: 16
trainer:
  {{steps: {steps}, prompts_per_step: 8, samples_per_prompt: 4, prompts_per_mini_batch: 4, export_hugging_face: false}}
evaluation: {{every: 0}}
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder of a Slurm of two nodes, which are this machine."""
    missing = [name for name in ("slurmctld", "slurmd", "sbatch", "scontrol") if not shutil.which(name)]
    if missing:
        pytest.skip(f"{', '.join(missing)} not found: apt-get install slurm-wlm")
    if os.geteuid() != 0:
        pytest.skip("slurmd runs jobs as other users: this test needs root")
    folder = tmp_path / "slurm"
    try:
        started = subprocess.run(
            ["bash", str(SETUP), "start", str(folder)], text=True, capture_output=True, check=False
        )
        assert started.returncode == 0, started.stderr
        monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        yield folder
    finally:
        subprocess.run(["scancel", "--user", "root"], check=False)
        subprocess.run(["bash", str(SETUP), "stop", str(folder)], check=False)


def sbatch(*arguments: str) -> str:
    return subprocess.run(
        ["sbatch", "--parsable", *arguments], text=True, capture_output=True, check=True
    ).stdout.strip()


def job(number: str) -> dict[str, str]:
    shown = subprocess.run(
        ["scontrol", "show", "job", "-o", number], text=True, capture_output=True, check=False
    ).stdout
    return dict(field.split("=", 1) for field in shown.split() if "=" in field)


def wait_for(condition: Callable[[], bool], seconds: float, what: str, log: Path) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not come: {log.read_text()[-4000:] if log.exists() else 'no log'}"
        time.sleep(0.5)


def steps(run: Path) -> list[int]:
    file = run / "metrics.jsonl"
    if not file.exists():
        return []
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [row["step"] for row in rows if "optimizer/loss" in row]


def submit(tmp_path: Path, steps: int) -> tuple[str, Path, Path]:
    """A job of two nodes: its number, run's folder and log."""
    model, run, log = tmp_path / "model", tmp_path / "shared" / "run", tmp_path / "job.log"
    tokenizer = byte_tokenizer()
    write_checkpoint(model, random_tiny_qwen3_moe(tokenizer, seed=1), tokenizer)
    config = tmp_path / "run.yaml"
    config.write_text(CONFIG.format(model=model, steps=steps))
    environment = {
        "RUN_DIR": str(run),
        "NPROC_PER_NODE": "1",
        "HEAD_ADDRESS": "127.0.0.1",
        "RAY_STORE_BYTES": str(128 << 20),
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    exported = ",".join(f"{name}={value}" for name, value in environment.items())
    number = sbatch(
        "--nodes=2",
        "--partition=low",
        f"--output={log}",
        f"--export=ALL,{exported}",
        str(ROOT / "docker/slurm/train.sbatch"),
        str(config),
    )
    return number, run, log


def wait_for_end(number: str, run: Path, log: Path, steps_: int) -> None:
    wait_for(lambda: job(number).get("JobState") in ("COMPLETED", "FAILED"), 700, "the end of the job", log)
    assert job(number)["JobState"] == "COMPLETED", log.read_text()[-4000:]
    assert steps(run) == list(range(1, steps_ + 1))
    ranks = {path.name for path in (run / "logs").glob("rank-*")}
    assert ranks == {"rank-00000.jsonl", "rank-00001.jsonl"}


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_two_nodes_a_preemption_and_the_resume(slurm: Path, tmp_path: Path) -> None:
    number, run, log = submit(tmp_path, STEPS)
    wait_for(lambda: len(steps(run)) >= 2, 600, "the second step", log)
    urgent = sbatch("--nodes=2", "--partition=high", f"--output={tmp_path}/urgent.log", "--wrap", "sleep 3")
    wait_for(lambda: job(urgent).get("JobState") == "COMPLETED", 300, "the job that preempts", log)
    before = steps(run)
    assert 2 <= len(before) < STEPS
    assert (run / f"checkpoints/step_{before[-1]:08d}/state.json").is_file(), "the state of the last step was saved"
    wait_for_end(number, run, log, STEPS)
    assert int(job(number)["Restarts"]) == 1
    assert f"stopped after step {before[-1]}" in log.read_text()


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_task_that_is_lost_is_started_again_in_the_same_job(slurm: Path, tmp_path: Path) -> None:
    number, run, log = submit(tmp_path, 3)
    wait_for(lambda: len(steps(run)) >= 1, 600, "the first step", log)
    tasks = [
        one
        for one in psutil.process_iter(["cmdline", "environ"])
        if "megatron_dppo.launch" in (one.info["cmdline"] or [])
        and (one.info["environ"] or {}).get("RUN_DIR") == str(run)
    ]
    next(one for one in tasks if one.info["environ"]["NODE_RANK"] == "1").kill()
    wait_for_end(number, run, log, 3)
    assert int(job(number)["Restarts"]) == 0
    assert "a task was lost (status 137) after 0 restarts" in log.read_text()
