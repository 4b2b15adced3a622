"""docker/start_node.sh: what becomes of an earlier run, how a stop ends, and how often lost ranks are started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from megatron_dppo.checkpoint.state_folder import folder_name, go_back
from megatron_dppo.errors import UserError
from megatron_dppo.launch import node
from megatron_dppo.launch.meeting import JobOver, Meeting, NodeLost, Nodes
from megatron_dppo.launch.restarts import Outcome, Restarts
from tests.distributed import PATIENCE_S
from tests.processes import free_port

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import json, os, pathlib, signal, sys, time
from megatron_dppo.errors import UserError
from megatron_dppo.launch import exit_status

def run():
    folder = pathlib.Path(os.environ["RUN_DIR"])
    with open(folder / "starts", "a") as file:
        file.write(json.dumps(sys.argv[1:]) + "\\n")
    starts = len((folder / "starts").read_text().splitlines())
    for ending, first, last in json.loads(os.environ.get("ENDINGS", "[]")):
        if first <= starts <= last:
            if ending == "saves":
                state = folder / f"checkpoints/step_{starts:08d}"
                state.mkdir(parents=True)
                (state / "state.json").touch()
            if ending == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if ending == "fault":
                raise ZeroDivisionError("a bug")
            if ending == "wrong":
                raise UserError("key x of file y is wrong; change it")
            if ending == "stopped":
                (folder / "stopped").touch()
            if ending == "waits":
                while not (folder / "stop").exists():
                    time.sleep(0.05)
                (folder / "stopped").touch()

sys.exit(exit_status(run))
"""


def popen(tmp_path: Path, endings: object = (), **variables: str) -> subprocess.Popen[str]:
    program, run = tmp_path / "program.sh", tmp_path / "run"
    program.write_text(PROGRAM)
    run.mkdir(exist_ok=True)
    environment = os.environ | {
        **{"PYTHON": sys.executable, "RUN_DIR": str(run), "NPROC_PER_NODE": "1", "SEEN_AFTER_S": "0"},
        **{"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path), "ENDINGS": json.dumps(endings)},
        **variables,
    }
    command = ["bash", str(ROOT / "docker/start_node.sh"), str(program), "a.b=c"]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def start(tmp_path: Path, endings: object = (), **variables: str) -> tuple[int, list[str]]:
    """Exit status and what was said."""
    process = popen(tmp_path, endings, **variables)
    _, said = process.communicate(timeout=PATIENCE_S)
    return process.returncode, said.splitlines()


def starts(tmp_path: Path) -> list[list[str]]:
    return [json.loads(line) for line in (tmp_path / "run/starts").read_text().splitlines()]


def test_a_run_without_a_checkpoint_is_put_aside_within_its_folder(tmp_path: Path) -> None:
    """The folder itself may be a mount, which cannot be renamed."""
    run = tmp_path / "run"
    (run / "tensorboard").mkdir(parents=True)
    (run / "metrics.jsonl").write_text("{}\n")
    number = run.stat().st_ino
    assert start(tmp_path)[0] == 0
    assert run.stat().st_ino == number
    assert not (run / "metrics.jsonl").exists()
    (lost,) = run.glob("lost-*")
    assert sorted(path.name for path in lost.iterdir()) == ["metrics.jsonl", "tensorboard"]
    assert starts(tmp_path) == [["a.b=c"]]


def test_a_job_script_of_before_still_starts_its_run(tmp_path: Path) -> None:
    (program := tmp_path / "program.sh").write_text(PROGRAM)
    environment = os.environ | {"RUN_DIR": str(tmp_path / "run"), "NPROC_PER_NODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "megatron_dppo.launch.node", str(program), "a.b=c"]
    assert subprocess.run(command, env=environment, timeout=PATIENCE_S, check=False).returncode == 0
    assert starts(tmp_path) == [["a.b=c"]]
    wrong = subprocess.run(command[:3], env=environment, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert wrong.returncode == 2
    assert "nothing is no file; give examples/run_NAME.sh" in wrong.stderr


def test_a_checkpoint_that_shows_late_is_gone_on_from(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("{}\n")
    state = run / "checkpoints/step_00000002/state.json"
    shown = threading.Timer(0.5, lambda: (state.parent.mkdir(parents=True), state.touch()))
    shown.start()
    assert start(tmp_path, SEEN_AFTER_S="60")[0] == 0
    assert (run / "metrics.jsonl").exists()
    assert starts(tmp_path) == [["a.b=c", "trainer.resume=true"]]


@pytest.mark.parametrize(
    ("endings", "variables", "status", "times"),
    [
        ([], {"STOPPED_STATUS": "75"}, 0, 1),
        ([["stopped", 1, 1]], {}, 0, 1),
        ([["stopped", 1, 1]], {"STOPPED_STATUS": "75"}, 75, 1),
        ([["wrong", 1, 9]], {}, 2, 1),  # a Kubernetes Job ends at once, and does not try again
        ([["killed", 1, 2]], {}, 0, 3),
        ([["killed", 1, 9]], {"MAX_RESTARTS": "1"}, 1, 2),
        ([["saves", 1, 4], ["killed", 1, 4]], {"MAX_RESTARTS": "1"}, 0, 5),  # every start brings a new state
        ([["fault", 1, 9]], {}, 1, 2),  # word for word: no loss
    ],
)
def test_how_it_ends_and_how_often_ranks_are_started(
    endings: object, variables: dict[str, str], status: int, times: int, tmp_path: Path
) -> None:
    ended, said = start(tmp_path, endings, **variables)
    assert (ended, len(starts(tmp_path))) == (status, times), said[-20:]
    file = tmp_path / "run/restarts.jsonl"
    counted = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    assert len(counted) == times - 1
    if status == 1:
        reason = "ZeroDivisionError: a bug" if "fault" in str(endings) else "ended with SIGKILL"
        assert reason in counted[0]["reason"]
        assert reason in said[-1]
        why = "the same error came again" if "fault" in str(endings) else "no new state after MAX_RESTARTS=1 restarts"
        assert any(line.startswith(f"megatron-dppo: {why}") and "no state is saved" in line for line in said)
    if "saves" in str(endings):
        assert [line["after_step"] for line in counted] == [1, 2, 3, 4]
        assert [line["restart"] for line in counted] == [1, 1, 1, 1]
        assert all(arguments[-1] == "trainer.resume=true" for arguments in starts(tmp_path)[1:])


def test_states_that_are_saved_after_going_back_count_as_new_ones(tmp_path: Path) -> None:
    root, lost = tmp_path / "checkpoints", Outcome(1, "megatron-dppo: failed: lost")

    def save(step: int) -> Path:
        state = root / folder_name(step)
        state.mkdir(parents=True)
        (state / "state.json").touch()
        (root / "latest").write_text(f"{state.name}\n")
        return state

    whole, damaged = save(10), save(20)
    restarts = Restarts(tmp_path, limit=1, goes_on=True)
    assert restarts.begin() == "step_00000020"
    go_back(whole, {damaged: "a bit is flipped"})
    assert restarts.again(lost)
    assert restarts.begin() == "step_00000010"
    for step in (12, 14, 20):
        save(step)
        assert restarts.again(lost)
        assert restarts.begin() == folder_name(step)
    (root / "latest").write_text("step_00000012\n")  # by hand
    assert restarts.begin() == "step_00000012"
    save(13)
    assert restarts.again(lost)
    restarts.begin()
    assert not restarts.again(lost)
    lines = [json.loads(line) for line in (tmp_path / "restarts.jsonl").read_text().splitlines()]
    assert [(line["restart"], line["after_step"]) for line in lines] == [(1, 10), (1, 12), (1, 14), (1, 20), (1, 13)]


def test_going_back_is_no_new_state(tmp_path: Path) -> None:
    states = [tmp_path / "checkpoints" / folder_name(step) for step in (10, 20)]
    for state in states:
        state.mkdir(parents=True)
        (state / "state.json").touch()
    restarts = Restarts(tmp_path, limit=3, goes_on=True)
    restarts.begin()
    assert restarts.again(Outcome(1, "megatron-dppo: failed: X"))
    restarts.begin()
    go_back(states[0], {states[1]: "a bit is flipped"})
    assert not restarts.again(Outcome(1, "megatron-dppo: failed: X"))


def test_the_reason_of_a_restart_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "run/restarts.jsonl").mkdir(parents=True)  # as good as a full disk: it starts again all the same
    assert Restarts(tmp_path / "run", limit=1).again(Outcome(1, "megatron-dppo: failed: lost"))
    message = "Traceback\n  ...\nmegatron-dppo: failed: rank 0: ActorDiedError: it died\nhints\nmore hints"
    assert Restarts(tmp_path, limit=1).again(Outcome(1, message))
    (line,) = (tmp_path / "restarts.jsonl").read_text().splitlines()
    assert json.loads(line)["reason"] == "megatron-dppo: failed: rank 0: ActorDiedError: it died"


def test_sigterm_asks_for_a_stop_at_the_end_of_the_step(tmp_path: Path) -> None:
    process = popen(tmp_path, [["waits", 1, 1]], STOPPED_STATUS="75")
    end = time.monotonic() + PATIENCE_S
    while not (tmp_path / "run/starts").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 75
    assert "node 0: SIGTERM; the running step is finished first" in said


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    assert start(tmp_path, NODES="2") == (
        2, ["megatron-dppo: error: NODE_RANK=: must be a whole number; see the top of docker/start_node.sh"],
    )  # fmt: skip
    several = {"NODES": "2", "NODE_RANK": "0", "HEAD_ADDRESS": "127.0.0.1"}
    status, said = start(tmp_path, **several, RAY_AUTH_TOKEN="")
    assert (status, "RAY_AUTH_TOKEN is not set" in said[-1]) == (2, True)
    said = start(tmp_path, **several | {"NODE_RANK": "2"})[1]
    assert said[-1] == "megatron-dppo: error: NODE_RANK=2: of NODES=2 nodes the last is 1"


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("NODES", "0", "must be a whole number from 1;"),
        ("NPROC_PER_NODE", "0", "must be a whole number from 1;"),
        ("HEAD_ADDRESS", "a..b", "is no name or address; name node 0's"),
        ("HEAD_ADDRESS", "10.0.0.1:29500", "is no name or address; name node 0's, without a port"),
        ("MASTER_PORT", "70000", "must be a whole number from 1 below 65536;"),
        ("RAY_PORT", "0", "must be a whole number from 1 below 65536;"),
        ("RAY_HEAD", "10.0.0.1", "must be host:port of the cluster's head"),
        ("RAY_GPUS", "all", "must be a whole number; see"),
        ("RAY_STORE_BYTES", "2GB", "must be a whole number; see"),
        ("STOPPED_STATUS", "256", "must be a whole number below 256;"),
        ("SEEN_AFTER_S", "soon", "must be a whole number; see"),
    ],
)
def test_a_variable_that_cannot_be_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, problem: str
) -> None:
    (program := tmp_path / "program.sh").touch()
    variables = {"RUN_DIR": str(tmp_path / "run"), "NODES": "2", "NODE_RANK": "0", "HEAD_ADDRESS": "127.0.0.1"}
    variables["JOIN_TIMEOUT_S"] = "1"
    for variable, given in {**variables, "RAY_AUTH_TOKEN": "0123456789", name: value}.items():
        monkeypatch.setenv(variable, given)
    with pytest.raises(UserError) as refused:
        node.main([str(program)])
    assert str(refused.value).startswith(f"{name}={value}: {problem}")
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """As of a claim of another user: a Job is not to try it again."""
    (file := tmp_path / "file").touch()
    status, said = start(tmp_path, RUN_DIR=f"{file}/run")
    cannot = f"megatron-dppo: error: RUN_DIR={file}/run cannot be written: Not a directory; choose another folder"
    assert (status, said) == (2, [cannot])


NODE = """
import os, sys
from pathlib import Path
from megatron_dppo.launch import exit_status, launch_local
from megatron_dppo.launch.meeting import Meeting, Nodes
from megatron_dppo.launch.restarts import Restarts
number, port, program = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
nodes = Nodes(int(os.environ.get("NODES", 2)), number, "127.0.0.1", port, join_timeout_s=300)
meeting = Meeting(nodes, Restarts(Path(os.environ["RUN_DIR"]), limit=3, goes_on=True))
sys.exit(exit_status(lambda: launch_local([sys.executable, program], processes=1, meeting=meeting)))
"""
PAIR = """
import datetime, os, pathlib, sys, time
from megatron_dppo.launch import exit_status

def run():
    import torch.distributed as dist
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=300))
    folder, rank = pathlib.Path(os.environ["RUN_DIR"]), dist.get_rank()
    if os.environ.get("FIRST_ENDS") and not any(folder.glob("done-*")):
        dist.barrier()
        if rank == 1:
            (folder / "done-first").touch()
            os._exit(0)
        while not (folder / "done-first").exists():
            time.sleep(0.1)
        time.sleep(1.0)  # until its agent waits for the other's
        os.kill(os.getpid(), 9)
    (folder / f"pid-{rank}-{os.getppid()}").touch()
    while not (folder / "go").exists():
        time.sleep(0.1)
    dist.barrier()
    (folder / f"done-{rank}").touch()

sys.exit(exit_status(run))
"""


class Pair:
    """Two nodes on loopback, without Ray, each with a rank."""

    def __init__(self, tmp_path: Path, **variables: str) -> None:
        self.run, self._program = tmp_path / "run", tmp_path / "pair.py"
        self._program.write_text(PAIR)
        self.run.mkdir()
        self._port = free_port()
        self._environment = os.environ | {
            **{"RUN_DIR": str(self.run), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
            **{"GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(tmp_path)},
            **variables,
        }

    def node(self, number: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", NODE, str(number), str(self._port), str(self._program)]
        return subprocess.Popen(command, env=self._environment, stderr=subprocess.PIPE, text=True)

    def wait_for_ranks(self, nodes: list[subprocess.Popen[str]]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not all(any(self.run.glob(f"pid-{rank}-{one.pid}")) for rank, one in enumerate(nodes)):
            assert time.monotonic() < end, [one.poll() for one in nodes]
            time.sleep(0.1)

    def end(self, nodes: list[subprocess.Popen[str]]) -> list[str]:
        """What they said."""
        (self.run / "go").touch()
        said = [one.communicate(timeout=PATIENCE_S)[1] for one in nodes]
        assert [one.returncode for one in nodes] == [0, 0], said
        assert all((self.run / f"done-{rank}").exists() for rank in (0, 1))
        return said


@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_that_is_killed_and_started_again_joins_the_others(lost: int, tmp_path: Path) -> None:
    """The other node's ranks are ended and started again with the new one's."""
    pair = Pair(tmp_path)
    nodes = [pair.node(0), pair.node(1)]
    pair.wait_for_ranks(nodes)
    nodes[lost].kill()
    nodes[lost].communicate()
    for file in pair.run.glob("pid-*"):
        file.unlink()
    nodes[lost] = pair.node(lost)
    pair.wait_for_ranks(nodes)
    said = pair.end(nodes)
    if lost == 1:
        assert "restart 1 of 3 from the beginning" in said[0]


def test_a_number_that_two_nodes_have_is_named(tmp_path: Path) -> None:
    """Three nodes were asked for, and two of them are told to be node 1."""
    pair = Pair(tmp_path, NODES="3")
    nodes = [pair.node(0), pair.node(1), pair.node(1)]
    said = [one.communicate(timeout=PATIENCE_S)[1].splitlines()[-1] for one in nodes]
    assert all("NODE_RANK=1 was given twice, to process" in line for line in said)
    assert all(f"process {one.pid} of" in line for line in said for one in nodes[1:])
    assert sorted(one.returncode for one in nodes) == [1, 1, 2]


def test_a_node_whose_ranks_are_done_starts_them_again_with_the_others(tmp_path: Path) -> None:
    """It waits at the end for the others, and no longer when they fail."""
    pair = Pair(tmp_path, FIRST_ENDS="1")
    said = pair.end([pair.node(0), pair.node(1)])
    assert "ended with SIGKILL" in said[0]
    assert "restart 1 of 3" in said[0]


@pytest.mark.parametrize("over", [False, True])
def test_what_a_call_of_an_earlier_attempt_finds_is_no_word_of_this_one(over: bool) -> None:
    """A call to a node that vanished returns a quarter of an hour later."""
    called, returns, ended = threading.Event(), threading.Event(), threading.Event()

    class Store:
        def set(self, key: str, value: str) -> None:
            called.set()
            returns.wait()
            raise RuntimeError("No route to host")

    meeting = Meeting(Nodes(2, 1, "127.0.0.1", 9), Restarts())
    beat = threading.Thread(target=meeting._beat, args=(Store(), ended))
    beat.start()
    called.wait()
    if over:
        ended.set()
    returns.set()
    beat.join()
    with nullcontext() if over else pytest.raises(NodeLost, match="node 0 was lost"):
        meeting.num_nodes_waiting()


@pytest.mark.parametrize(
    ("number", "whom", "end"), [(0, "node 1", "missing: 1"), (1, "node 0 at 127.0.0.1:", "did not")]
)
def test_who_is_waited_for_is_named(
    number: int, whom: str, end: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megatron_dppo.launch.meeting._QUIET_S", 0.0)
    nodes = Nodes(2, number, "127.0.0.1", 0 if number == 0 else 9, join_timeout_s=1)
    with pytest.raises(JobOver, match=end):
        Meeting(nodes, Restarts()).join()
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"megatron-dppo: waiting for {whom}")
    assert said.endswith(", JOIN_TIMEOUT_S=1 at most")


def test_a_node_that_does_not_see_the_state_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert Restarts(tmp_path).see("step_00000002") == "step_00000002"
    (said,) = capsys.readouterr().err.splitlines()
    assert said == (
        f"megatron-dppo: {tmp_path} has no state here and step_00000002 on node 0, also after SEEN_AFTER_S=0: all "
        "nodes must share it"
    )
