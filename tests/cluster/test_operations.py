"""Logs, secrets, heartbeats and stop requests, each in processes of its own where signals or hangs are involved."""

import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_dppo.errors import UserError
from megatron_dppo.launch.heartbeat import Beat, Heartbeat, culprits, read_beats
from megatron_dppo.launch.heartbeat import main as health
from megatron_dppo.launch.logs import logging_to
from megatron_dppo.launch.secrets import redact
from megatron_dppo.launch.stop import StopRequest
from tests.distributed import PATIENCE_S


def script(tmp_path: Path, body: str, *arguments: str) -> subprocess.Popen[str]:
    file = tmp_path / "script.py"
    file.write_text(body)
    command = [sys.executable, "-u", str(file), str(tmp_path), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(condition, seconds: float = PATIENCE_S) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened in time"
        time.sleep(0.05)


def test_a_log_line_has_rank_host_and_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "c0ffee-very-secret")
    with logging_to(tmp_path, rank=3) as file:
        logging.getLogger("megatron_dppo.x").info("key %s", "c0ffee-very-secret")
        try:
            raise ValueError("at https://me:pass123@host/")
        except ValueError:
            logging.getLogger("other").exception("failed")
    logging.getLogger("megatron_dppo.x").info("after")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["message"] for line in lines] == ["key ***", "failed"]
    assert {(line["rank"], line["host"]) for line in lines} == {(3, socket.gethostname())}
    assert "ValueError: at https://***@host/" in lines[1]["exception"]
    assert "c0ffee" not in file.read_text()
    assert "pass123" not in file.read_text()


WARNS = """
import logging, sys
from pathlib import Path
from megatron_dppo.launch.logs import logging_to

log = logging.getLogger("megatron_dppo.x")
with logging_to(Path(sys.argv[1]), 0):
    log.info("all is well")
    log.warning("something is odd at https://me:pass123@host/")
log.warning("after")
"""


def test_a_warning_reaches_the_terminal_and_the_file(tmp_path: Path) -> None:
    process = script(tmp_path, WARNS)
    out, err = process.communicate(timeout=PATIENCE_S)
    odd = "something is odd at https://***@host/"
    assert (process.returncode, out, err) == (0, "", f"{odd}\nafter\n")
    lines = [json.loads(line) for line in (tmp_path / "logs/rank-00000.jsonl").read_text().splitlines()]
    assert [line["message"] for line in lines] == ["all is well", odd]


def test_a_full_disk_is_one_line_and_no_end_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "logs/rank-00000.jsonl"
    file.parent.mkdir()
    file.symlink_to("/dev/full")
    process = script(tmp_path, WARNS)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (0, "")
    full = f"{file} cannot be written: No space left on device"
    assert err.splitlines() == [full, "something is odd at https://***@host/", "after"]


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("hf_abcdefghijklmnopqrstuvwxyz", "***"),
        ("x sk-proj-0123456789abcdefghij y", "x *** y"),
        ("s3cr3t-value here", "*** here"),
        ("an ordinary line about tokens=512", "an ordinary line about tokens=512"),
        ("path /etc/token", "path /etc/token"),
    ],
)
def test_redaction(text: str, hidden: str) -> None:
    environment = {"MY_SECRET": "s3cr3t-value", "TOKENIZERS_PARALLELISM": "true", "TOKEN_FILE": "/etc/token"}
    assert redact(text, environment) == hidden


HUNG = """
import sys, time
from pathlib import Path
from megatron_dppo.launch.heartbeat import Heartbeat
from megatron_dppo.launch.logs import logging_to

def stuck_in_a_collective():
    time.sleep(60)

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    with logging_to(folder, 0), Heartbeat(folder, 0, limit=1.0, watch_peers=True).running() as heartbeat:
        heartbeat.beat("training", 7)
        stuck_in_a_collective()
"""


def test_a_hung_rank_is_named_and_its_stacks_are_written(tmp_path: Path) -> None:
    process = script(tmp_path, HUNG)
    try:
        stacks, log = tmp_path / "stacks/rank-00000.txt", tmp_path / "logs/rank-00000.jsonl"
        wait_for(lambda: stacks.exists() and "stuck_in_a_collective" in stacks.read_text())
        named = f"behind the others: rank 0 on {socket.gethostname()} (pid {process.pid}) in training of step 7"
        wait_for(lambda: log.exists() and named in log.read_text())
        assert health([str(tmp_path)]) == 1
        assert health([str(tmp_path.parent)]) == 1
    finally:
        process.kill()
        process.communicate()


def test_a_rank_that_moves_on_is_healthy_and_leaves_nothing(tmp_path: Path) -> None:
    with Heartbeat(tmp_path, 0, limit=60.0, watch_peers=True).running() as heartbeat:
        heartbeat.beat("rollout", 1)
        assert [beat.phase for beat in read_beats(tmp_path)] == ["rollout"]
        assert health([str(tmp_path)]) == 0
    assert read_beats(tmp_path) == []
    assert list((tmp_path / "stacks").iterdir()) == []


def test_what_a_killed_run_left_is_no_reason_to_end_the_next(tmp_path: Path) -> None:
    """A container that starts again has the same name, and its processes' numbers begin anew."""
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait()
    (tmp_path / "heartbeats").mkdir()
    for number in (gone.pid, os.getpid()):  # nobody's, and that of a process which is younger
        beat = Beat(3, socket.gethostname(), number, "training", 7, since=1e9, limit=60.0)
        (tmp_path / "heartbeats/rank-00003.json").write_text(json.dumps(vars(beat)))
        assert read_beats(tmp_path)[0].overdue > 0
        assert health([str(tmp_path)]) == 0


def test_a_folder_that_cannot_be_written_or_read_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Heartbeat(tmp_path, 0, limit=60.0).running() as heartbeat:
        (tmp_path / "heartbeats/rank-00001.json").write_text('{"rank": 1, "ho')
        assert [beat.rank for beat in read_beats(tmp_path)] == [0]
        shutil.rmtree(tmp_path / "heartbeats")
        heartbeat.beat("rollout", 1)
        assert "rank-00000.json cannot be written: No such file" in caplog.text


@pytest.mark.parametrize("name", ["heartbeats", "stacks", "stacks/rank-00000.txt"])
def test_a_folder_that_takes_no_more_files_is_named_at_the_start(tmp_path: Path, name: str) -> None:
    """As where a quota of files is used up; without a name it was a fault of ours, and ranks were started again."""
    blocked = tmp_path / name
    blocked.parent.mkdir(exist_ok=True)
    blocked.mkdir() if blocked.suffix else blocked.write_text("")
    with (
        pytest.raises(
            UserError, match=rf"^{re.escape(str(blocked))} cannot be (made|written): .*; choose another run\.dir"
        ),
        Heartbeat(tmp_path, 0, limit=60.0).running(),
    ):
        pass


def test_the_rank_that_others_wait_for() -> None:
    def beat(rank: int, phase: str, step: int, since: float) -> Beat:
        return Beat(rank, "host", 1, phase, step, since, 10.0)

    assert culprits([]) == []
    # Rank 2 is a step behind; the others wait for it in the next one's rollout.
    assert [
        b.rank for b in culprits([beat(0, "rollout", 5, 3.0), beat(1, "rollout", 5, 3.0), beat(2, "training", 4, 1.0)])
    ] == [2]
    # Rank 0 still rolls out, the engine hangs; nobody has moved on.
    assert [b.rank for b in culprits([beat(0, "rollout", 5, 3.0), beat(1, "rollout", 5, 3.0)])] == [0, 1]
    assert [b.rank for b in culprits([beat(0, "rollout", 5, 1.0), beat(1, "training", 5, 3.0)])] == [0]


STEPS = """
import sys, time
from pathlib import Path
from megatron_dppo.launch import exit_status, stop
stop.TERM_GRACE_SECONDS = float(sys.argv[2])

def run():
    folder = Path(sys.argv[1])
    request = stop.StopRequest(folder)
    with request.listening():
        print("ready", flush=True)
        for step in range(1, 100):
            print(f"step {step}", flush=True)
            time.sleep(float(sys.argv[3]))
            if request.reason:
                print(f"saved {step} {request.reason}", flush=True)
                request.done(step)
                return 0
    return 1

if __name__ == "__main__":
    sys.exit(exit_status(run))
"""


def stopped(tmp_path: Path, how, *, grace: float, step: float) -> tuple[int, list[str]]:
    """Exit status, and the last two lines: what step had begun when `how` was done (on a busy machine not always the
    first), and what became of it."""
    process = script(tmp_path, STEPS, str(grace), str(step))
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n", "step 1\n"]
    how(process)
    out, _ = process.communicate(timeout=PATIENCE_S)
    return process.returncode, ["step 1", *out.splitlines()][-2:]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_waits_for_the_end_of_the_step(tmp_path: Path, number: signal.Signals) -> None:
    status, out = stopped(tmp_path, lambda process: process.send_signal(number), grace=10, step=0.5)
    begun, saved = out
    assert (status, saved) == (0, f"{begun.replace('step', 'saved')} {number.name}")
    assert (tmp_path / "stopped").read_text() == f"{begun}\n"


def test_repeated_signals_do_not_cut_the_step_short(tmp_path: Path) -> None:
    def twice(process: subprocess.Popen[str]) -> None:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)

    status, (begun, saved) = stopped(tmp_path, twice, grace=10, step=2.0)
    assert (status, saved) == (0, f"{begun.replace('step', 'saved')} SIGTERM")


def test_a_step_that_takes_too_long_after_sigterm_is_broken_off(tmp_path: Path) -> None:
    status, out = stopped(tmp_path, lambda process: process.send_signal(signal.SIGTERM), grace=0.5, step=2000)
    assert (status, out) == (143, ["step 1"])


def test_sigterm_is_heard_behind_another_signal(tmp_path: Path) -> None:
    """As of Slurm: SIGUSR1 some minutes before the end, SIGTERM at it, and SIGKILL soon after."""

    def both(process: subprocess.Popen[str]) -> None:
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)

    status, out = stopped(tmp_path, both, grace=0.5, step=2000)
    assert (status, out) == (143, ["step 1"])


def test_a_file_asks_as_well_and_is_taken_away(tmp_path: Path) -> None:
    status, out = stopped(tmp_path, lambda process: (tmp_path / "stop").touch(), grace=10, step=0.3)
    assert status == 0
    assert f"the file {tmp_path / 'stop'}" in out[-1]
    assert not (tmp_path / "stop").exists()


def test_an_old_answer_is_taken_away_and_handlers_come_back(tmp_path: Path) -> None:
    (tmp_path / "stopped").write_text("step 3\n")
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest(tmp_path).listening() as request:
        assert not (tmp_path / "stopped").exists()
        assert request.reason == ""
        os.kill(os.getpid(), signal.SIGUSR1)
        assert request.reason == "SIGUSR1"
    assert signal.getsignal(signal.SIGTERM) is before
