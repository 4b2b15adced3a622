"""One process at a time in a folder: two that start together, a holder that dies, hangs or is on another machine."""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from examples.tiny_moe_dppo.model import byte_tokenizer, random_tiny_qwen3_moe, write_checkpoint
from megatron_dppo.checkpoint import state_folder
from megatron_dppo.cli import main
from megatron_dppo.errors import SystemFault, UserError
from megatron_dppo.launch import lease as module
from megatron_dppo.launch.lease import lease
from megatron_dppo.trainer.history import read_rows
from megatron_dppo.trainer.tracking import METRICS_FILE, Tracker
from tests.distributed import PATIENCE_S
from tests.system_faults import failing
from tests.tiny import tiny_qwen3_moe

FORK = multiprocessing.get_context("fork")


def steps_done(folder: Path) -> int:
    if not state_folder.finished_states(folder):
        return 0
    return int(state_folder.latest_state(folder).name.removeprefix("step_"))


def train(folder: Path, delay: float) -> None:
    """As a run does: take the lease, go on from the newest state, write rows and states. Exit status 2 if refused."""
    time.sleep(delay)
    try:
        with lease(folder / module.FOLDER, of=f"run.dir={folder}"):
            first = steps_done(folder)
            with closing(Tracker(folder, resume_step=first)) as tracker:
                for step in range(first + 1, first + 4):
                    tracker.log(step, {"pid": os.getpid()})
                    state_folder.remove_leftovers(folder)
                    partial = folder / f".{state_folder.folder_name(step)}.incomplete-{os.getpid()}"
                    partial.mkdir()
                    (partial / "weights").write_bytes(random.randbytes(1000))
                    time.sleep(random.uniform(0, 0.01))
                    state_folder.finish_state(partial, folder, step, {"step": step}, keep=2, digests={})
    except UserError as error:
        assert "is in use by another process on" in str(error), error  # noqa: PT017
        os._exit(2)
    os._exit(0)


def test_two_at_random_delays_never_lose_a_row_or_a_state(tmp_path: Path) -> None:
    """Fifty times two processes, one in three of them killed at some moment."""
    rng, finished = random.Random(0), 0
    outcomes: set[tuple[int | None, ...]] = set()
    for _ in range(50):
        both = [FORK.Process(target=train, args=(tmp_path, rng.uniform(0, 0.05))) for _ in range(2)]
        for process in both:
            process.start()
        if rng.random() < 1 / 3:
            time.sleep(rng.uniform(0.02, 0.1))
            os.kill(both[0].pid, signal.SIGKILL)
        for process in both:
            process.join(PATIENCE_S)
        statuses = [process.exitcode for process in both]
        outcomes.add(tuple(sorted(statuses)))
        assert set(statuses) <= {0, 2, -signal.SIGKILL}
        assert 0 in statuses or -signal.SIGKILL in statuses
        finished += statuses.count(0)
        rows = [row["step"] for row in read_rows(tmp_path / METRICS_FILE)]
        done = steps_done(tmp_path)
        # Every step once, in order; the last one's row comes before its state, and may be what a killed one left.
        assert rows in ([*range(1, done + 1)], [*range(1, done + 2)])
        assert done >= 3 * finished
        if done:
            assert (state_folder.latest_state(tmp_path) / "weights").stat().st_size == 1000
    assert (0, 2) in outcomes
    assert not (tmp_path / module.FOLDER).exists() or list((tmp_path / module.FOLDER).iterdir())


def holder(place: Path) -> subprocess.Popen[str]:
    """A process that holds the lease until its input ends."""
    body = (
        "import sys; from pathlib import Path; from megatron_dppo.launch import lease\n"
        "lease.BEAT_S = 0.05\n"
        "with lease.lease(Path(sys.argv[1]), of='it'): print('held', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", body, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.parametrize(("number", "kind"), [(errno.ESTALE, SystemFault), (errno.EROFS, UserError)])
def test_a_folder_that_cannot_be_written_is_the_users_fault_or_the_systems(
    number: int, kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", failing(number))
    with pytest.raises(kind, match=f"it cannot be written: {os.strerror(number)}; choose"), lease(tmp_path, of="it"):
        pass


def test_the_second_is_refused_in_one_line_and_changes_nothing(tmp_path: Path) -> None:
    first = holder(tmp_path / "l")
    try:
        names = sorted(path.name for path in (tmp_path / "l").iterdir())
        with pytest.raises(UserError) as refused, lease(tmp_path / "l", of="run.dir=here"):
            pass
        host = socket.gethostname()
        assert str(refused.value) == (
            f"run.dir=here is in use by another process on {host} (process {first.pid}); wait for it, or choose another"
        )
        assert sorted(path.name for path in (tmp_path / "l").iterdir()) == names
    finally:
        first.communicate(timeout=PATIENCE_S)
    assert first.returncode == 0
    assert not (tmp_path / "l").exists()
    with lease(tmp_path / "l", of="it"):
        pass


def test_a_killed_holder_is_followed_at_once(tmp_path: Path) -> None:
    first = holder(tmp_path / "l")
    first.kill()
    first.communicate()
    begun = time.monotonic()
    with lease(tmp_path / "l", of="it"):
        assert [path.name for path in (tmp_path / "l").iterdir()] == ["2"]
    assert time.monotonic() - begun < module.STALE_S / 2


@pytest.mark.parametrize("change", [{"boot": "another"}, {"processes": "pid:[1]"}])
def test_a_holder_that_is_not_seen_from_here_is_watched(
    change: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another machine, or in another container: only its beat tells, whatever its clock says."""
    monkeypatch.setattr(module, "STALE_S", 600.0)
    here = module._describe()
    monkeypatch.setattr(module, "_describe", lambda: here | change)
    first = holder(tmp_path / "l")
    try:
        with pytest.raises(UserError, match="is in use"), lease(tmp_path / "l", of="it"):
            pass  # a beat was seen
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate()
    monkeypatch.setattr(module, "STALE_S", 1.0)
    os.utime(next((tmp_path / "l").iterdir()), (4e9, 4e9))
    with lease(tmp_path / "l", of="it"):
        assert [path.name for path in (tmp_path / "l").iterdir()] == ["2"]


def test_a_holder_that_stood_still_for_too_long_ends_before_it_writes_on(tmp_path: Path) -> None:
    first = holder(tmp_path / "l")
    first.send_signal(signal.SIGSTOP)
    (tmp_path / "l/1").unlink()  # what whoever takes it over does
    first.send_signal(signal.SIGCONT)
    first.wait(PATIENCE_S)
    _, said = first.communicate(timeout=PATIENCE_S)
    assert first.returncode == 2
    assert said == "megatron-dppo: error: it was taken over by another process; this one stood still\n"


def test_of_many_that_find_the_same_dead_holder_one_follows(tmp_path: Path) -> None:
    first = holder(tmp_path / "l")
    first.kill()
    first.communicate()
    inside, refused = FORK.Value("i", 0), FORK.Value("i", 0)
    gate = FORK.Barrier(8)

    def follow() -> None:
        gate.wait()
        try:
            with lease(tmp_path / "l", of="it"):
                with inside.get_lock():
                    inside.value += 1
                while refused.value < 7:
                    time.sleep(0.01)
        except UserError:
            with refused.get_lock():
                refused.value += 1
        os._exit(0)

    followers = [FORK.Process(target=follow) for _ in range(8)]
    for process in followers:
        process.start()
    for process in followers:
        process.join(PATIENCE_S)
    assert (inside.value, refused.value) == (1, 7)


def test_a_lease_that_cannot_be_read_counts_as_one_without_a_beat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STALE_S", 0.5)
    for text in ("", "[]", json.dumps({"host": "x"})):
        (tmp_path / "l").mkdir(exist_ok=True)
        (tmp_path / "l/7").write_text(text)
        with lease(tmp_path / "l", of="it"):
            assert [path.name for path in (tmp_path / "l").iterdir()] == ["8"]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused = pytest.raises(UserError, match=r"run.dir=x cannot be written: .*; choose another folder")
    with refused, lease(tmp_path / "file/l", of="run.dir=x"):
        pass


@contextlib.contextmanager
def standing_still(arguments: list[str], place: Path) -> Iterator[subprocess.Popen[str]]:
    """Inside, `megatron-dppo ARGUMENTS` has the lease `place` and goes no further; afterwards it has ended well."""
    command = [sys.executable, "-m", "megatron_dppo.cli", *arguments]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables)
    try:
        end = time.monotonic() + PATIENCE_S
        while not (place / "1").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end
            time.sleep(0.001)
        os.kill(process.pid, signal.SIGSTOP)
        while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:  # what it is writing it writes to the end
            assert time.monotonic() < end
            time.sleep(0.001)
        yield process
        os.kill(process.pid, signal.SIGCONT)
        printed = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, printed
    finally:
        process.kill()
        process.communicate()


def refused(arguments: list[str], output: Path, first: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The second of two commands ends with one line and status 2, and leaves no file of its own."""
    before = sorted(output.parent.rglob("*"))
    capsys.readouterr()
    assert main(arguments) == 2
    where = f"{socket.gethostname()} (process {first})"
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert line.endswith(f"{output} is in use by another process on {where}; wait for it, or choose another")
    assert sorted(output.parent.rglob("*")) == before


def test_two_conversions_into_one_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, states, back = tmp_path / "source", tmp_path / "a/states", tmp_path / "b/back"
    tiny_qwen3_moe(source, seed=8, num_hidden_layers=2)
    for read, written in ((source, states), (states, back)):
        written.parent.mkdir()
        arguments = ["convert", str(read), str(written), "--overwrite"]
        with standing_still(arguments, written.parent / f".{written.name}{module.FOLDER}") as first:
            refused(arguments, written, first.pid, capsys)
        assert [path.name for path in written.parent.iterdir()] == [written.name]
    original, converted = load_file(source / "model.safetensors"), load_file(back / "model.safetensors")
    assert original.keys() == converted.keys()
    assert all(torch.equal(converted[name], original[name]) for name in original)


@pytest.mark.full
def test_two_evaluations_into_one_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer, out = byte_tokenizer(), tmp_path / "a/out"
    out.parent.mkdir()
    write_checkpoint(tmp_path / "model", random_tiny_qwen3_moe(tokenizer, seed=1), tokenizer)
    (tmp_path / "q.jsonl").write_text("".join(f'{{"problem": "Find {i}.", "answer": "{i}"}}\n' for i in range(3)))
    sizes = ["rollout.max_prompt_tokens=32", "rollout.max_response_tokens=6", "rollout.kv_cache_mib=64"]
    arguments = ["evaluate", str(tmp_path / "model"), str(tmp_path / "q.jsonl"), "--out", str(out)]
    arguments += [*sizes, "rollout.max_num_seqs=8", "rollout.dtype=float32", "evaluation.samples=2"]
    with standing_still(arguments, out / module.FOLDER) as first:
        refused(arguments, out, first.pid, capsys)
    assert sorted(path.name for path in out.iterdir()) == ["q.jsonl", "summary.json"]
    rows = [json.loads(line) for line in (out / "q.jsonl").read_text().splitlines()[1:]]
    assert sorted((row["prompt"], row["sample"]) for row in rows) == [(i, j) for i in range(3) for j in range(2)]
    assert json.loads((out / "summary.json").read_text())["q"]["questions"] == 3
