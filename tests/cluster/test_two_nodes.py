"""docker/start_node.sh on two nodes: an example loses a node, its network and processes, and comes to the same end.

`RANDOM_KILLS` (default 2) is how many processes are killed at random moments.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.cluster.two_nodes import ROOT, TwoNodes, network_of, two_nodes, why_not

KILLS = int(os.environ.get("RANDOM_KILLS", "2"))
STEPS = 4
SETTINGS = [
    *(f"trainer.steps={STEPS}", "trainer.prompts_per_step=16", "trainer.prompts_per_mini_batch=8"),
    *("trainer.checkpoint_every=1", "trainer.export_hugging_face=false", "trainer.parity_check=false"),
    *("evaluation.every=0", "rollout.kv_cache_mib=64"),
]
EXAMPLE = str(ROOT / "examples/run_tiny_moe_dppo.sh")
PATIENCE_S = 1500
"""Of a machine that does other work."""
OPEN = {"gcs_server", "raylet", "ray::DashboardAgent", "ray::RolloutStore", "ray::EngineHost", "ray::IDLE",
        "ray monitor", "ray client", "rank"}  # fmt: skip
"""Ray's, which has no option for it (its driver is in the rank); all ask for the job's token."""
FABRIC = {"start_node.sh", "rank", "VLLM::EngineCore", "ray::RuntimeEnvAgent", "ray::DashboardAgent", "ray client"}
"""At the address that leads to the other node."""
LOOPBACK = {"ray::DashboardAgent", "ray client", "VLLM::EngineCore", "rank"}

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(3600),
]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for all runs here."""
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("model") / "model"
    make = [sys.executable, str(ROOT / "examples/tiny_moe_dppo/make_model.py"), str(folder)]
    subprocess.run(make, check=True, timeout=PATIENCE_S, env=os.environ | {"PYTHONPATH": str(ROOT)})
    return folder


@dataclass(frozen=True)
class Whole:
    """The run that nobody disturbs."""

    losses: dict[int, tuple[float, float]]
    listening: set[tuple[int, str, str]]
    """(node, who, address)"""


@pytest.fixture
def folder(tmp_path: Path, shared: Path) -> Path:
    """What two nodes share, with the model in it."""
    folder = tmp_path / "shared"
    folder.mkdir()
    subprocess.run(["cp", "-r", str(shared), str(folder / "model")], check=True)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Whole:
    folder = tmp_path_factory.mktemp("whole")
    subprocess.run(["cp", "-r", str(shared), str(folder / "model")], check=True)
    seen: set[tuple[int, str, str]] = set()
    with two_nodes(folder, EXAMPLE, *SETTINGS) as nodes:
        for node in (0, 1):
            nodes.start(node)
        end = time.monotonic() + PATIENCE_S
        while any(process.poll() is None for process in nodes.running.values()):
            assert time.monotonic() < end
            for node in (0, 1):
                seen |= {(node, who, address) for who, address in listeners(node)}
            time.sleep(1.0)
        assert nodes.wait(1) == [0, 0], nodes.log(0).read_text()[-3000:]
        assert [nodes.left(node) for node in (0, 1)] == [[], []]
        assert nodes.restarts() == []
        return Whole(nodes.losses(), seen)


def listeners(node: int) -> Iterator[tuple[str, str]]:
    command = ["ip", "netns", "exec", network_of(node), sys.executable, "-c", _LIST]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    for line in listed.stdout.splitlines():
        address, pid = line.split()
        yield name_of(int(pid)), address


_LIST = """
import psutil
for c in psutil.net_connections("tcp"):
    if c.status == psutil.CONN_LISTEN and c.pid:
        print(c.laddr.ip.removeprefix("::ffff:"), c.pid)
"""


def name_of(pid: int) -> str:
    try:
        command = psutil.Process(pid).cmdline() or ["?"]
    except psutil.Error:
        return "gone"
    first = command[0].split()[0] if command[0] else "?"
    if first.startswith("ray::"):
        return "ray::" + first.removeprefix("ray::").split(":")[-1].split(".")[0]
    if first.startswith("VLLM::"):
        return first
    if Path(first).name in ("gcs_server", "raylet"):
        return Path(first).name
    if "megatron_dppo.launch" in command:
        return "start_node.sh"
    if any(part.endswith("run_tiny_moe_dppo.sh") for part in command):
        return "rank"
    for part, name in (
        ("client.server", "ray client"),
        ("monitor", "ray monitor"),
        ("/ray/", "ray (starting)"),
        ("import ray", "ray (starting)"),
    ):
        if any(part in one for one in command):
            return name
    return " ".join(command)


def same_end(nodes: TwoNodes, whole: Whole) -> None:
    found = nodes.losses()
    assert sorted(found) == sorted(whole.losses)
    for step, values in whole.losses.items():
        assert found[step] == pytest.approx(values, rel=1e-6, abs=1e-6), step


def test_every_listening_socket_of_both_nodes_is_known(whole: Whole) -> None:
    """docs/security.md has the same table."""
    fabric = {0: "10.77.0.1", 1: "10.77.0.2"}
    assert {node for node, _, _ in whole.listening} == {0, 1}
    assert {"start_node.sh", "rank", "gcs_server", "raylet", "VLLM::EngineCore"} <= {
        who for _, who, _ in whole.listening
    }
    everywhere = {who for _, who, address in whole.listening if address in ("0.0.0.0", "::")}
    assert everywhere - {"gone", "ray (starting)"} <= OPEN
    at_the_fabric = {who for node, who, address in whole.listening if address == fabric[node]}
    assert at_the_fabric - {"gone", "ray (starting)"} <= FABRIC
    elsewhere = {(who, a) for node, who, a in whole.listening if a not in ("0.0.0.0", "::", fabric[node])}
    assert {who for who, _ in elsewhere} - {"gone", "ray (starting)"} <= LOOPBACK
    assert {address for _, address in elsewhere} <= {"127.0.0.1", "::1"}


def reach_step_2(nodes: TwoNodes) -> None:
    for node in (0, 1):
        nodes.start(node)
    nodes.wait_for_step(1, PATIENCE_S)
    time.sleep(0.5)


@pytest.mark.parametrize("node", [1, 0])
def test_a_node_that_is_lost_in_step_2_and_comes_back(node: int, folder: Path, whole: Whole) -> None:
    with two_nodes(folder, EXAMPLE, *SETTINGS) as nodes:
        reach_step_2(nodes)
        nodes.kill(node)
        before = sorted(nodes.losses())
        time.sleep(3)
        nodes.start(node)
        assert nodes.wait(PATIENCE_S) == [0, 0], nodes.log(0).read_text()[-3000:]
        print(f"lost after {before}: {nodes.restarts()}")
        assert before[-1] < STEPS
        same_end(nodes, whole)
        assert [nodes.left(each) for each in (0, 1)] == [[], []]


@pytest.mark.parametrize("node", [1, 0])
def test_a_node_that_vanishes_in_step_2_and_is_replaced(node: int, folder: Path, whole: Whole) -> None:
    """No word of it ever again, not even that its connections are closed."""
    with two_nodes(folder, EXAMPLE, *SETTINGS, LOST_AFTER_S="20") as nodes:
        reach_step_2(nodes)
        nodes.vanish(node)
        before = sorted(nodes.losses())
        nodes.start(node)
        assert nodes.wait(PATIENCE_S) == [0, 0], nodes.log(0).read_text()[-3000:]
        print(f"vanished after {before}: {nodes.restarts()}")
        assert before[-1] < STEPS
        same_end(nodes, whole)
        assert [nodes.left(each) for each in (0, 1)] == [[], []]


def test_a_link_that_is_cut_for_20_seconds(folder: Path, whole: Whole) -> None:
    with two_nodes(folder, EXAMPLE, *SETTINGS) as nodes:
        for node in (0, 1):
            nodes.start(node)
        nodes.wait_for_step(1, PATIENCE_S)
        nodes.cut(1)
        time.sleep(20)
        nodes.mend(1)
        assert nodes.wait(PATIENCE_S) == [0, 0], nodes.log(0).read_text()[-3000:]
        print(f"the link was cut: {nodes.restarts()}")
        same_end(nodes, whole)


def test_processes_that_are_killed_at_random(folder: Path, whole: Whole) -> None:
    """Any process of either node but the first of all, which is a node lost. Each costs the running step at most."""
    chance = random.Random(KILLS)
    killed = 0
    while killed < KILLS:
        subprocess.run(["rm", "-rf", str(folder / "run")], check=True)
        with two_nodes(folder, EXAMPLE, *SETTINGS, MAX_RESTARTS="6") as nodes:
            for node in (0, 1):
                nodes.start(node)
            trained: list[tuple[int, int]] = []  # when a process was killed: restarts so far, the last step
            for step in range(1, STEPS):
                nodes.wait_for_step(step, PATIENCE_S)
                time.sleep(chance.uniform(0.0, 2.0))
                node = chance.randrange(2)
                victims = [
                    one for one in nodes.processes(node)[1:] if name_of(one.pid) not in ("start_node.sh", "gone")
                ]
                if not victims or killed == KILLS:
                    break
                victim = chance.choice(victims)
                name = name_of(victim.pid)
                before = max(nodes.losses())
                victim.kill()
                trained.append((len(nodes.went_on_after()), before))
                killed += 1
                print(f"kill {killed}: {name} of node {node} after step {before}", flush=True)
            assert nodes.wait(PATIENCE_S) == [0, 0], nodes.log(0).read_text()[-3000:]
            print(f"restarts: {nodes.restarts()}", flush=True)
            # Each goes on from the state of the step that was trained, or from the one before. Ray may notice a lost
            # agent a step later: then from a later state.
            for number, went_on in enumerate(nodes.went_on_after()):
                by = [step for restarts, step in trained if restarts == number]
                by = by or [step for restarts, step in trained if restarts < number]
                assert any(step - went_on <= 1 for step in by), (number, went_on, trained)
            same_end(nodes, whole)
            assert [nodes.left(each) for each in (0, 1)] == [[], []]
