"""Whatever ends a run, all of it ends, and the last line says why."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from megatron_dppo.errors import UserError
from megatron_dppo.launch import exit_status
from megatron_dppo.launch.local import _free_shared_memory
from tests.distributed import PATIENCE_S

LAUNCHER = """
import sys
from megatron_dppo.launch import exit_status, launch_local
command = [sys.executable, "-u", *sys.argv[1:]]
sys.exit(exit_status(lambda: launch_local(command, processes=2, on_stop="To go on: do this")))
"""
# torchrun's own agent, or any other that gives its ranks these variables, without its seconds of start-up.
LAUNCHER_OF_ONE_RANK = """
import os, subprocess, sys
error_file = os.environ["TMPDIR"] + "/error.json"
rank = os.environ | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_ERROR_FILE": error_file}
subprocess.run([sys.executable, "-u", *sys.argv[1:]], env=rank)
"""
RANK = """
import os, pathlib, signal, subprocess, sys, time
from megatron_dppo.errors import UserError
from megatron_dppo.launch import exit_status

def end():
    if ending == "peer":
        raise UserError("key x of file y is wrong; change it")
    if ending == "fault":
        raise ZeroDivisionError("a bug")
    if ending == "killed":
        from multiprocessing import get_context, resource_tracker
        name = get_context("spawn").Semaphore()._semlock.name
        pathlib.Path(os.environ["TMPDIR"], "semaphore").write_text(name.removeprefix("/"))
        os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)

def run():
    rank, here = int(os.environ["RANK"]), pathlib.Path(os.environ["TMPDIR"])
    if ending == "peer":
        import torch, torch.distributed
        torch.distributed.init_process_group("gloo")
    (here / f"ready-{rank}").touch()
    if rank == 1:
        while not (here / "busy").exists():
            time.sleep(0.05)
        return end()
    try:
        if ending in ("killed", "interrupted"):
            print("detached", subprocess.Popen(["sleep", "600"], start_new_session=True).pid, flush=True)
        (here / "busy").touch()
        if ending == "peer":
            torch.distributed.all_reduce(torch.ones(1))
        time.sleep(100)
    finally:
        print("engine closed", flush=True)

ending = sys.argv[1]
sys.exit(exit_status(run))
"""


def start(tmp_path: Path, ending: str, launcher: str = LAUNCHER) -> subprocess.Popen[str]:
    """Two ranks under the launcher that end as `ending` says."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    command = [sys.executable, "-c", launcher, str(script), ending]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@dataclass(frozen=True)
class Ended:
    """A run that has ended by itself."""

    folder: Path
    status: int
    out: str
    errors: list[str]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Every way of ending by itself, run side by side, since each waits more than it computes."""
    started = {}
    for ending in ("peer", "fault", "killed"):
        folder = tmp_path_factory.mktemp(ending)
        started[ending] = (folder, start(folder, ending))
    results = {}
    for ending, (folder, process) in started.items():
        out, errors = process.communicate(timeout=PATIENCE_S)
        results[ending] = Ended(folder, process.returncode, out, errors.splitlines())
    return results


def test_the_rank_that_gave_the_reason_is_reported_not_the_one_that_lost_its_peer(ended: dict[str, Ended]) -> None:
    run = ended["peer"]
    assert run.status == 2
    assert run.errors[-1] == "megatron-dppo: error: key x of file y is wrong; change it"
    assert not any("Traceback" in line for line in run.errors)
    assert not list(run.folder.glob("megatron-dppo-*"))  # logs are kept for faults only


def test_a_fault_shows_its_traceback_then_one_line_and_keeps_the_output(ended: dict[str, Ended]) -> None:
    run = ended["fault"]
    assert run.status == 1
    assert run.out == "engine closed\n"
    assert any("Traceback" in line for line in run.errors)
    assert run.errors[-1].startswith("megatron-dppo: failed: rank 1: ZeroDivisionError: a bug (output of the ranks: ")
    assert list(run.folder.glob("megatron-dppo-*/*/attempt_0/1/stderr.log"))


def test_a_rank_that_is_killed_ends_the_others_and_their_orphans(ended: dict[str, Ended]) -> None:
    run = ended["killed"]
    assert run.status == 1
    assert "rank 1 ended with SIGKILL (out of memory, or killed by hand)" in run.errors[-1]
    detached = [int(line.split()[1]) for line in run.out.splitlines() if line.startswith("detached")]
    assert len(detached) == 1
    assert not psutil.pid_exists(detached[0])
    semaphore = (run.folder / "semaphore").read_text()
    assert not Path(f"/dev/shm/sem.{semaphore}").exists()


def test_what_another_job_of_this_user_made_meanwhile_stays() -> None:
    """A semaphore that only its maker has, as between making a queue and starting whoever reads it."""
    since = time.time() - 1
    lock = multiprocessing.get_context("spawn").Lock()
    file = Path(f"/dev/shm/sem.{lock._semlock.name[1:]}")
    assert file.exists()
    _free_shared_memory(since)
    assert file.exists()
    copy = file.with_name(f"{file.name}-left-behind")
    os.link(file, copy)  # the same file, when nobody maps it any more
    del lock
    gc.collect()
    _free_shared_memory(since)
    assert not copy.exists()


def test_ctrl_c_closes_everything(tmp_path: Path) -> None:
    process = start(tmp_path, "interrupted")
    assert process.stdout is not None
    detached = int(process.stdout.readline().split()[1])
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert out == "engine closed\n"
    assert errors == "megatron-dppo: interrupted; all ranks are stopped. To go on: do this\n"
    assert not psutil.pid_exists(detached)
    assert not any(member.is_running() for member in family)


def test_a_rank_does_not_outlive_a_launcher_that_is_killed(tmp_path: Path) -> None:
    process = start(tmp_path, "interrupted", LAUNCHER_OF_ONE_RANK)
    assert process.stdout is not None
    detached = psutil.Process(int(process.stdout.readline().split()[1]))
    ranks = psutil.Process(process.pid).children()
    while not (tmp_path / "busy").exists():
        time.sleep(0.05)
    process.kill()
    _, alive = psutil.wait_procs(ranks, timeout=PATIENCE_S)
    detached.kill()  # nothing is left that could have swept it
    assert process.communicate(timeout=PATIENCE_S)[0] == "engine closed\n"
    assert len(ranks) == 1
    assert not alive


def raises(error: BaseException) -> int:
    raise error


def test_exit_status_of_a_single_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(lambda: None) == 0
    assert exit_status(lambda: 3) == 3
    assert capsys.readouterr().err == ""
    assert exit_status(lambda: raises(UserError("file f: missing"))) == 2
    assert capsys.readouterr().err == "megatron-dppo: error: file f: missing\n"
    assert exit_status(lambda: raises(KeyError("k"))) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1] == "megatron-dppo: failed: KeyError: 'k'"


def test_what_was_added_to_an_error_is_part_of_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    for error, status, line in (
        (UserError("file f: missing."), 2, "megatron-dppo: error: file f: missing. Step 2 is saved"),
        (ValueError("no number"), 1, "megatron-dppo: failed: ValueError: no number. Step 2 is saved"),
    ):
        error.add_note("Step 2 is saved")
        assert exit_status(lambda: raises(error)) == status  # noqa: B023
        assert capsys.readouterr().err.splitlines()[-1] == line


def test_a_signal_unwinds_the_stack_and_the_handlers_come_back(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    closed = []

    def run() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        except KeyboardInterrupt:  # any other exception would be lost in Ray's blocking calls
            closed.append("engine")
            raise

    assert exit_status(run) == 143
    assert closed == ["engine"]
    assert capsys.readouterr().err == "megatron-dppo: stopped by SIGTERM\n"
    assert signal.getsignal(signal.SIGTERM) is before


FINALIZED = """
import os, signal, sys, time
from megatron_dppo.launch.rank import exit_status

class Freed:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)

def run():
    Freed()
    time.sleep(300)

sys.exit(exit_status(run))
"""


def test_ctrl_c_is_not_lost_where_an_object_is_being_freed() -> None:
    """Python lets no exception out of a `__del__`."""
    ended = subprocess.run([sys.executable, "-c", FINALIZED], capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stderr) == (130, "megatron-dppo: stopped by SIGINT\n")


TWO_COMMANDS = """
import os, signal, sys, time
from megatron_dppo.launch.rank import exit_status

def run():
    exit_status(lambda: None)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(300)

sys.exit(exit_status(run))
"""


def test_a_rank_that_is_ended_between_two_commands_has_the_status_of_the_signal(tmp_path: Path) -> None:
    """Handlers of a rank outlive a command."""
    environment = os.environ | {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    assert (
        subprocess.run([sys.executable, "-c", TWO_COMMANDS], env=environment, timeout=100, check=False).returncode
        == 143
    )


class InterruptedWhileFreed:
    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)


def test_a_signal_that_comes_while_an_object_is_freed_does_not_strike_behind_the_run() -> None:
    def run() -> None:
        InterruptedWhileFreed()

    before = signal.getsignal(signal.SIGALRM)
    assert exit_status(run) == 0, "it was over before"
    time.sleep(0.1)
    assert signal.getsignal(signal.SIGALRM) is before


def test_a_reason_is_not_lost_to_a_signal_that_came_while_an_object_was_freed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Slow(UserError):
        def __str__(self) -> str:  # as a terminal that takes its time
            time.sleep(0.1)
            return super().__str__()

    def run() -> None:
        InterruptedWhileFreed()
        raise Slow("file f: missing")

    assert exit_status(run) == 2
    assert capsys.readouterr().err == "megatron-dppo: error: file f: missing\n"
