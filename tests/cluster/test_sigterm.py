"""A run that is ended by SIGTERM at random moments goes on where it was, and ends with the same losses.

`SIGTERM_TIMES` (default 2) is how many runs are made; each is ended once, anywhere between its start and its last step.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TIMES = int(os.environ.get("SIGTERM_TIMES", "2"))
CANARY = "canary-5ecre7-value"
STEPS = 6
ROOT = Path(__file__).resolve().parents[2]
SETTINGS = [
    *("run.name=sigterm", "evaluation.every=0", "trainer.export_hugging_face=false", "trainer.parity_check=false"),
    *(f"trainer.steps={STEPS}", "trainer.prompts_per_step=16", "trainer.prompts_per_mini_batch=8"),
]


def start(folder: Path, model: Path) -> subprocess.Popen[str]:
    resume = any(folder.glob("checkpoints/step_*/state.json"))
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"),
        *(
            str(Path(sys.executable).with_name("megatron-dppo")),
            "train",
            str(ROOT / "examples/tiny_moe_dppo/tiny_moe_dppo.yaml"),
        ),
        *(*SETTINGS, f"run.dir={folder}", f"model.path={model}", f"trainer.resume={str(resume).lower()}"),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_TOKEN": CANARY, "WANDB_API_KEY": CANARY}
    with open(folder.with_suffix(".log"), "a") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, text=True, env=environment)


def losses(folder: Path) -> dict[int, tuple[float, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        row["step"]: (row["optimizer/loss"], row["optimizer/grad_norm"]) for row in lines if "optimizer/loss" in row
    }


def rows(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return file.read_text().count('"optimizer/loss":') if file.exists() else 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Partly right, so that advantages, and with them losses, are not all zero."""
    folder = tmp_path_factory.mktemp("model") / "model"
    subprocess.run(
        [sys.executable, str(ROOT / "examples/tiny_moe_dppo/make_model.py"), str(folder)], check=True, timeout=500
    )
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[int, tuple[float, float]]:
    """Losses of the run that nobody ends."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert start(folder, model).wait(timeout=500) == 0, folder.with_suffix(".log").read_text()[-3000:]
    expected = losses(folder)
    assert list(expected) == list(range(1, STEPS + 1))
    assert all(norm > 0 for _, norm in expected.values())
    return expected


def wait_for_moment(process: subprocess.Popen[str], folder: Path, chance: random.Random) -> str:
    """Until somewhere in the start (one time in five), or a random time after a random step."""
    if chance.random() < 0.2:
        seconds = chance.uniform(0.0, 30.0)
        time.sleep(seconds)
        return f"{seconds:.1f} s after the start"
    step, seconds = chance.randrange(STEPS - 1), chance.uniform(0.0, 2.0)
    while rows(folder) < step and process.poll() is None:
        time.sleep(0.02)
    time.sleep(seconds)
    return f"{seconds:.2f} s after step {step}"


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(TIMES))
def test_ended_at_a_random_moment(
    number: int, whole: dict[int, tuple[float, float]], model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "ended"
    process = start(folder, model)
    moment = wait_for_moment(process, folder, random.Random(number))
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=120)
    state = (folder / "stopped").read_text().strip() if (folder / "stopped").exists() else "no"
    print(f"SIGTERM {moment}: saved {state}, {rows(folder)} steps logged")
    if not any(folder.glob("checkpoints/step_*/state.json")) and (folder / "metrics.jsonl").exists():
        folder.rename(folder.with_name("lost"))  # as docker/start_node.sh does: ended before anything was saved
    assert start(folder, model).wait(timeout=500) == 0, folder.with_suffix(".log").read_text()[-3000:]
    resumed = losses(folder)
    assert list(resumed) == list(whole)
    for step, values in whole.items():
        assert resumed[step] == pytest.approx(values, rel=1e-3, abs=1e-6), step
    for file in (file for file in folder.rglob("*") if file.is_file()):
        assert CANARY.encode() not in file.read_bytes(), file
    assert CANARY not in folder.with_suffix(".log").read_text()
