"""docker/start_node.sh with stand-ins for what it starts: what becomes of an earlier run, and how a stop ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "docker/start_node.sh"
STUBS = {
    "ray": "exec sleep 60",
    "python": "cat >/dev/null",
    "torchrun": """
echo "$@" >"$RUN_DIR/command"
if [ -n "${STOP:-}" ]; then touch "$RUN_DIR/stopped"; fi
exit "${STATUS:-0}"
""",
}


def start(tmp_path: Path, run: Path, without: str = "", **variables: str) -> int:
    stubs = tmp_path / "stubs"
    stubs.mkdir(exist_ok=True)
    for name, body in STUBS.items():
        if name == without:
            continue
        (stubs / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (stubs / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{stubs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        **{"NODES": "1", "NODE_RANK": "0", "HEAD_ADDRESS": "127.0.0.1", "CONFIG": "run.yaml", "RAY_AUTH_TOKEN": "x"},
        **{"RUN_DIR": str(run), "NPROC_PER_NODE": "1", "SEEN_AFTER_S": "2"},
        **variables,
    }
    return subprocess.run(["bash", str(SCRIPT)], env=environment, timeout=60, check=False).returncode


def test_a_run_without_a_checkpoint_is_put_aside_within_its_folder(tmp_path: Path) -> None:
    """The folder itself may be a mount, which cannot be renamed."""
    run = tmp_path / "run"
    (run / "tensorboard").mkdir(parents=True)
    (run / "metrics.jsonl").write_text("{}\n")
    number = run.stat().st_ino
    assert start(tmp_path, run) == 0
    assert run.stat().st_ino == number
    assert not (run / "metrics.jsonl").exists()
    (lost,) = run.glob("lost-*")
    assert sorted(path.name for path in lost.iterdir()) == ["metrics.jsonl", "tensorboard"]
    assert "trainer.resume=true" not in (run / "command").read_text()


def test_a_run_with_a_checkpoint_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints/step_00000002").mkdir(parents=True)
    (run / "checkpoints/step_00000002/state.json").touch()
    (run / "metrics.jsonl").write_text("{}\n")
    assert start(tmp_path, run) == 0
    assert (run / "metrics.jsonl").exists()
    assert "trainer.resume=true" in (run / "command").read_text()


def test_a_checkpoint_that_shows_late_is_gone_on_from(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("{}\n")
    state = run / "checkpoints/step_00000002/state.json"
    shown = threading.Timer(0.5, lambda: (state.parent.mkdir(parents=True), state.touch()))
    shown.start()
    assert start(tmp_path, run, SEEN_AFTER_S="30") == 0
    assert "trainer.resume=true" in (run / "command").read_text()


@pytest.mark.parametrize(
    ("variables", "status"),
    [
        ({}, 0),
        ({"STOP": "1"}, 0),
        ({"STOP": "1", "STOPPED_STATUS": "75"}, 75),
        ({"STOPPED_STATUS": "75"}, 0),
        ({"STOP": "1", "STATUS": "1", "STOPPED_STATUS": "75"}, 1),
    ],
)
def test_the_exit_status_tells_a_stop_from_the_end(tmp_path: Path, variables: dict[str, str], status: int) -> None:
    assert start(tmp_path, tmp_path / "run", **variables) == status


def test_a_configuration_that_cannot_run_is_told_by_the_exit_status(tmp_path: Path) -> None:
    """By the real torchrun, whose own is 1: a Kubernetes Job ends at once, and does not try again."""
    nowhere = str(tmp_path / "nowhere.yaml")
    assert start(tmp_path, tmp_path / "run", without="torchrun", CONFIG=nowhere, MASTER_PORT="0") == 2
