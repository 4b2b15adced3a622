"""What a model wrote is evaluated, and can do nothing: in place of one answer in four it reads secrets, opens sockets,
forks, fills the disk, forges rewards, does not end. As the user of the test, as a plain user, and in each rung."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_dppo.tasks.workers import sandbox
from tests.processes import command_of
from tests.tasks.workers.evaluating import SECRET

ROOT = Path(__file__).parents[3]
AS_A_PLAIN_USER = [
    # Python itself may lie in root's home: the one capability stays to read it there.
    *("setpriv", "--reuid=54321", "--regid=54321", "--clear-groups", "--inh-caps=-all,+dac_read_search"),
    *("--ambient-caps=-all,+dac_read_search", "--bounding-set=-all,+dac_read_search"),
]


def scored(folder: Path, user: str, rung: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(folder)}
    prefix = []
    if rung == "landlock":
        tools = folder.parent / "tools"
        tools.mkdir()
        (tools / "setpriv").symlink_to(shutil.which("setpriv") or "/nowhere")
        environment["PATH"] = str(tools)
    if user == "plain":
        os.chown(folder, 54321, 54321)
        prefix = AS_A_PLAIN_USER
    command = [*prefix, sys.executable, "-m", "tests.tasks.workers.evaluating", str(folder)]
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert SECRET not in done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["rung"] == rung
    return found


@pytest.mark.parametrize(("user", "rung"), [("same", "landlock"), ("plain", "landlock"), ("same", "bubblewrap")])
def test_one_answer_in_four_is_hostile(user: str, rung: str) -> None:
    if rung == "bubblewrap" and sandbox.rung() != "bubblewrap":
        pytest.skip("bubblewrap is not installed, or does not work here")
    if user == "plain" and (os.getuid() or not shutil.which("setpriv")):
        pytest.skip("the test runs as a plain user already, or there is no setpriv")
    folder = Path("/tmp") / f"hostile-{os.getpid()}-{time.monotonic_ns()}" / "own"  # pytest's own is closed to others
    try:
        folder.mkdir(parents=True)
        folder.parent.chmod(0o755)
        found = scored(folder, user, rung)
        assert found["user"] == (os.getuid() if user == "same" else 54321)
        assert found["honest"] == found["clean"]
        assert set(found["clean"]) == {(0.0).hex(), (1.0).hex()}
        earned = {name: verdict["score"] for name, verdict in found["hostile"].items() if verdict["score"]}
        assert not earned
        assert found["left"] == [str(folder / "private")]
        assert not found["changed"]
        assert not found["reached"]
        error = {name: verdict["error"] for name, verdict in found["hostile"].items()}
        assert "answered more than it was asked" in error["forge and answer"]
        assert "outside of its bounds [0, 1]" in error["forge out of bounds"]
        for name in ("sleep", "half an answer", "an answer and no end", "print", "stop"):
            assert found["hostile"][name]["timed_out"], name
    finally:
        shutil.rmtree(folder.parent)


def test_what_started_the_workers_may_be_killed(tmp_path: Path) -> None:
    """Nothing of a killed trainer goes on: neither the workers nor what they run."""
    code = (
        "import time; from tests.tasks.workers.evaluating import *\n"
        "it = TimedVerifier(CustomVerifier('tests.tasks.workers.evaluating:evaluate'), 300)\n"
        "pool = LocalVerifierPool({'it': it}, workers=2, memory_mib=4096)\n"
        "print('go', flush=True)\n"
        "pool.verify([('it', Answered(question='', reference='7', response='', answer='time.sleep(300)'))] * 2)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, cwd=ROOT) as trainer:
        assert trainer.stdout is not None
        trainer.stdout.readline()
        deadline = time.monotonic() + 120
        while True:  # two that supervise, and two that evaluate
            started = psutil.Process(trainer.pid).children(recursive=True)
            commands = [command_of(process) for process in started]
            if sum("supervisor" in c and "bwrap" not in c for c in commands) == 4:
                break
            assert time.monotonic() < deadline
            time.sleep(0.05)
        trainer.kill()
    _, alive = psutil.wait_procs(started, timeout=300)
    assert not alive
    deadline = time.monotonic() + 60
    while list(tmp_path.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_jumps_of_the_filter_stay_in_it(machine: str) -> None:
    """Numbers of system calls are those of the kernel's headers, where they are installed."""
    program = sandbox.filter_program(machine, 4711)
    steps = [program[at : at + 8] for at in range(0, len(program), 8)]
    for place, step in enumerate(steps):
        assert place + 1 + max(step[2], step[3]) <= len(steps) - (step[0] not in (0x06,))
    headers = {
        "x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h",
        "aarch64": "/usr/include/asm-generic/unistd.h",
    }
    header = Path(headers[machine])
    if not header.exists():
        return
    known = dict(line.split()[1:3] for line in header.read_text().splitlines() if line.startswith("#define __NR"))
    tables = (sandbox._FORBIDDEN, sandbox._TO_ITSELF, sandbox._SOCKETPAIR, *sandbox._FIRST_NOT)
    words = " ".join(tables).split()
    for name, *numbers in zip(words[::3], words[1::3], words[2::3], strict=True):
        number = numbers[machine == "aarch64"]
        assert number in (known.get(f"__NR_{name}", "-"), known.get(f"__NR3264_{name}", "-")), name
