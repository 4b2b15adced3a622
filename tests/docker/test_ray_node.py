"""A node's Ray: one that does not start, hangs or ends is noticed, and leaves nothing behind."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import psutil
import pytest

from megatron_dppo.launch.meeting import NodeLost, Nodes
from megatron_dppo.launch.node import RayNode
from tests.distributed import PATIENCE_S
from tests.processes import command_of, free_port


@pytest.fixture
def ray_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RayNode:
    settings = {"RAY_PORT": str(free_port()), "RAY_NODES": "1", "RAY_AUTH_TOKEN": "5" * 64, "RAY_GPUS": "0"}
    for name, value in {**settings, "RAY_STORE_BYTES": str(128 << 20), "RAY_ADDRESS": "", "RAY_AUTH_MODE": ""}.items():
        monkeypatch.setenv(name, value)
    return RayNode(Nodes(2, 0, "127.0.0.1", 1, join_timeout_s=PATIENCE_S), tmp_path)


def test_a_ray_that_does_not_start_is_not_waited_for(
    ray_node: RayNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is one whose other nodes are lost; and the process that waited for it ends, whatever Ray's core does."""
    monkeypatch.setattr("megatron_dppo.launch.node._RAY", "import sys; sys.exit('no such option')")
    monkeypatch.setattr("megatron_dppo.launch.node._PAUSE_S", 0.1)
    log = tmp_path / "ray-node-0.log"
    start = time.monotonic()
    with pytest.raises(NodeLost, match="Ray ended on node 0 with status 1, see"):
        ray_node.running(lambda: None).__enter__()

    assert log.read_text().count("no such option") == 4

    def lost() -> None:
        raise NodeLost("another node failed")

    with pytest.raises(NodeLost, match="another node failed"):
        ray_node.running(lost).__enter__()
    assert time.monotonic() - start < PATIENCE_S / 4


SLEEPS = "import time; time.sleep(600)"


@pytest.mark.parametrize("given", [True, False])
def test_a_head_with_an_ipv6_address_is_reached(given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray writes it in brackets, which a socket does not take."""
    monkeypatch.setattr("megatron_dppo.launch.node._RAY", SLEEPS)
    monkeypatch.setattr("megatron_dppo.launch.node._WAIT", "import os; os.environ['RAY_ADDRESS'].index('[::1]:')")
    monkeypatch.setenv("RAY_ADDRESS", "")
    monkeypatch.setenv("RAY_AUTH_MODE", "")
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as head:
        port = head.getsockname()[1]
        monkeypatch.setenv(*(("RAY_HEAD", f"[::1]:{port}") if given else ("RAY_PORT", str(port))))
        node = RayNode(Nodes(2, 1, "::1", join_timeout_s=2), tmp_path)
        with node.running(lambda: None):
            node.alive()


def test_a_waiter_that_says_much_or_hangs_holds_nobody(ray_node: RayNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """160 KB are more than a pipe takes."""
    monkeypatch.setattr("megatron_dppo.launch.node._RAY", SLEEPS)
    talks = "import sys; [print('W' * 79, file=sys.stderr) for _ in range(2000)]"
    monkeypatch.setattr("megatron_dppo.launch.node._WAIT", talks)
    with ray_node.running(lambda: None):
        ray_node.alive()
    monkeypatch.setattr("megatron_dppo.launch.node._WAIT", f"{talks}; sys.exit('the last word')")
    with pytest.raises(NodeLost, match=r"^the last word; see"):
        ray_node.running(lambda: None).__enter__()
    monkeypatch.setattr("megatron_dppo.launch.node._WAIT", SLEEPS)
    monkeypatch.setattr("megatron_dppo.launch.node._LATE_S", 1.0 - PATIENCE_S)
    with pytest.raises(NodeLost, match="Ray did not answer node 0 in time, see"):
        ray_node.running(lambda: None).__enter__()


def test_what_an_attempt_left_is_ended_before_the_next(
    ray_node: RayNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon in a process group of its own, which no signal to its parent ends; the last attempt's as well."""
    pids = tmp_path / "pids"
    daemon = f"import os, signal, time; os.setpgid(0, 0); signal.signal(15, signal.SIG_IGN); {SLEEPS}"
    ray = f"""
import subprocess, sys
daemon = subprocess.Popen([sys.executable, "-c", {daemon!r}])
with open({str(pids)!r}, "a") as file:
    print(daemon.pid, file=file)
sys.exit("timed out")
"""
    monkeypatch.setattr("megatron_dppo.launch.node._RAY", ray)
    monkeypatch.setattr("megatron_dppo.launch.node._WAIT", SLEEPS)
    monkeypatch.setattr("megatron_dppo.launch.node._PAUSE_S", 0.1)
    most = 0

    def count() -> None:
        nonlocal most
        started = pids.read_text().split() if pids.exists() else []
        most = max(most, sum(psutil.pid_exists(int(pid)) for pid in started))

    with pytest.raises(NodeLost, match="Ray ended on node 0 with status 1"):
        ray_node.running(count).__enter__()
    started = pids.read_text().split()
    assert (len(started), most) == (4, 1)
    assert not any(psutil.pid_exists(int(pid)) for pid in started)


@pytest.mark.full
def test_a_ray_that_is_too_slow_is_started_again(
    ray_node: RayNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_dppo.launch import node

    slow = f"import pathlib, sys; f = pathlib.Path({str(tmp_path / 'slow')!r})\nif not f.exists():\n  f.touch()"
    first = f"{slow}; sys.exit('The current node timed out during startup.')\n"
    monkeypatch.setattr(node, "_RAY", first + node._RAY)
    with ray_node.running(lambda: None):
        ray_node.alive()


@pytest.mark.full
def test_a_raylet_that_leaves_in_good_order_is_noticed(ray_node: RayNode) -> None:
    """It does when an agent of it is killed, and `ray start --block` says nothing of that."""
    with ray_node.running(lambda: None):
        node = ray_node
        node.alive()
        assert node._process is not None
        family = psutil.Process(node._process.pid).children(recursive=True)
        next(one for one in family if "DashboardAgent" in command_of(one)).kill()
        end = time.monotonic() + PATIENCE_S
        said = ""
        while not said and time.monotonic() < end:
            try:
                node.alive()
            except NodeLost as lost:
                said = str(lost)
            time.sleep(0.1)
        assert said.startswith("a daemon of Ray ended on node 0")
