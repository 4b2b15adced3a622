"""Nodes on this machine: each has a network, a host name, processes, /tmp and /dev/shm of its own. A switch is between
them, which goes on when a node is gone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path("/mnt")
"""Where every node sees the folder that they share; their /tmp is their own."""
_MACHINES = (0, 1, 2)
"""The third takes the place of one that vanishes. Machine i has the address 10.77.0.(i + 1)."""
_UNSHARE = ("unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc")
_NODE = """
set -e
ip link set lo up
hostname "$NODE_NAME"
mount --bind "$SHARED_FOLDER" /mnt
mount --bind /mnt/hosts-"$NODE_NAME" /etc/hosts
case $PROJECT in /tmp/*) mount --bind "$PROJECT" /media ;; esac
mount -t tmpfs tmpfs /tmp
case $PROJECT in /tmp/*) mkdir -p "$PROJECT" && mount --bind /media "$PROJECT" ;; esac
mount -t tmpfs tmpfs /dev/shm
bash "$START" "$@" && status=0 || status=$? # not exec: the first process of a node takes care of orphans
sleep 2
{
  ls -A /dev/shm
  for p in /proc/[0-9]*; do [ "$p" = /proc/$$ ] || tr '\\0' ' ' <"$p/cmdline"; done
} 2>/dev/null >/mnt/left-"$NODE_NAME"
exit $status
"""


def why_not() -> str:
    """Why there are no such nodes here; "" where there are."""
    missing = [name for name in ("ip", "unshare") if not shutil.which(name)]
    if missing:
        return f"{', '.join(missing)} not found"
    if os.geteuid() != 0:
        return "network namespaces need root"
    tried = subprocess.run(["ip", "netns", "add", network_of("try")], capture_output=True, text=True, check=False)
    if tried.returncode == 0:
        inside = ["ip", "netns", "exec", network_of("try"), *_UNSHARE, "true"]
        tried = subprocess.run(inside, capture_output=True, text=True, check=False)
        subprocess.run(["ip", "netns", "delete", network_of("try")], check=False)
    return f"namespaces are not permitted: {tried.stderr.strip()}" if tried.returncode else ""


def network_of(machine: int | str) -> str:
    """Name of its network namespace: other tests have theirs at the same time."""
    return f"dppo-{os.getpid()}-{machine}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@dataclass
class TwoNodes:
    folder: Path
    """Of both: SHARED in them."""
    variables: dict[str, str]
    arguments: list[str]
    count: int = 2
    running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    machine: dict[int, int] = field(default_factory=lambda: {0: 0, 1: 1})
    """On which a node runs."""
    vanished: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def log(self, node: int) -> Path:
        return self.folder / f"node-{node}.log"

    def start(self, node: int) -> None:
        """The one command of a node."""
        self._tell_names(self.machine[node])
        environment = os.environ | {
            **{"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_AUTH_TOKEN": "5" * 64},
            **{"NODES": str(self.count), "NODE_RANK": str(node), "HEAD_ADDRESS": "head", "NPROC_PER_NODE": "1"},
            **{"RUN_DIR": f"{SHARED}/run", "MODEL_DIR": f"{SHARED}/model", "RAY_STORE_BYTES": str(128 << 20)},
            **{"NODE_NAME": f"node{self.machine[node]}", "SHARED_FOLDER": str(self.folder), "SEEN_AFTER_S": "5"},
            **{"START": str(ROOT / "docker/start_node.sh"), "PROJECT": str(ROOT)},
            "RAY_memory_monitor_refresh_ms": "0",  # it counts what other tests have, too
            **self.variables,
        }
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "VLLM_HOST_IP", "RAY_ADDRESS", "TMPDIR"):
            environment.pop(name, None)
        inside = ["ip", "netns", "exec", network_of(self.machine[node]), *_UNSHARE]
        with open(self.log(node), "ab") as log:
            command = [*inside, "bash", "-c", _NODE, "node", *self.arguments]
            self.running[node] = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def kill(self, node: int) -> None:
        """The whole node at once, as when its power goes: no process of it says good-bye, no connection is closed."""
        self.cut(node)
        _end(self.running.pop(node))
        self.mend(node)

    def vanish(self, node: int) -> None:
        """Nothing is heard of the node again: its network is gone for good, and its processes stand still with all
        that they hold. Another machine takes its place, and has the name of the head where that was there."""
        self.cut(node)
        for _ in range(2):  # again, for what was started meanwhile
            for process in self.processes(node):
                with suppress(psutil.NoSuchProcess):
                    process.suspend()
        self.vanished.append(self.running.pop(node))
        self.machine[node] = 2
        for other in self.running:
            self._tell_names(self.machine[other])

    def _tell_names(self, machine: int) -> None:
        """A machine's /etc/hosts, in place."""
        lines = ["127.0.0.1 localhost", f"127.0.1.1 node{machine}", f"10.77.0.{self.machine[0] + 1} head"]
        (self.folder / f"hosts-node{machine}").write_text("\n".join(lines) + "\n")

    def cut(self, node: int) -> None:
        _ip("-n", network_of(self.machine[node]), "link", "set", "lan", "down")

    def mend(self, node: int) -> None:
        _ip("-n", network_of(self.machine[node]), "link", "set", "lan", "up")

    def processes(self, node: int) -> list[psutil.Process]:
        return psutil.Process(self.running[node].pid).children(recursive=True)

    def wait(self, seconds: float) -> list[int]:
        """Exit statuses."""
        end = time.monotonic() + seconds
        return [self.running[node].wait(timeout=max(1.0, end - time.monotonic())) for node in sorted(self.running)]

    def left(self, node: int) -> list[str]:
        """What an ended node had in /dev/shm, and processes, when the start script was done."""
        return (self.folder / f"left-node{self.machine[node]}").read_text().split("\n")[:-1]

    def restarts(self) -> list[str]:
        """Reasons."""
        return [line["reason"] for line in self._restarts()]

    def went_on_after(self) -> list[int]:
        """The steps whose states the restarts began with."""
        return [line["after_step"] for line in self._restarts()]

    def _restarts(self) -> list[dict[str, Any]]:
        file = self.folder / "run/restarts.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def losses(self) -> dict[int, tuple[float, float]]:
        """By step, with the norm of the gradient."""
        file = self.folder / "run/metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        return {r["step"]: (r["optimizer/loss"], r["optimizer/grad_norm"]) for r in rows if "optimizer/loss" in r}

    def wait_for_step(self, step: int, seconds: float) -> None:
        """Until its state is saved."""
        end = time.monotonic() + seconds
        while not (self.folder / f"run/checkpoints/step_{step:08d}/state.json").exists():
            dead = [node for node, process in self.running.items() if process.poll() is not None]
            assert not dead, f"node {dead} ended: {self.log(dead[0]).read_text()[-3000:]}"
            assert time.monotonic() < end, f"step {step} did not come: {self.log(0).read_text()[-3000:]}"
            time.sleep(0.1)


@contextmanager
def two_nodes(folder: Path, *arguments: str, **variables: str) -> Iterator[TwoNodes]:
    """Not started yet. Everything of theirs is gone afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    nodes = TwoNodes(folder, variables, list(arguments))
    lan, spaces = network_of("lan"), [network_of(machine) for machine in ("lan", *_MACHINES)]
    for space in spaces:
        _ip("netns", "add", space)
    _ip("-n", lan, "link", "add", "name", "lan", "type", "bridge")
    _ip("-n", lan, "link", "set", "lan", "up")
    for machine in _MACHINES:
        port, space = f"port{machine}", network_of(machine)
        _ip("link", "add", port, "netns", lan, "type", "veth", "peer", "name", "lan", "netns", space)
        _ip("-n", lan, "link", "set", port, "master", "lan", "up")
        _ip("-n", space, "address", "add", f"10.77.0.{machine + 1}/24", "dev", "lan")
        _ip("-n", space, "link", "set", "lan", "up")
    try:
        yield nodes
    finally:
        for process in (*nodes.running.values(), *nodes.vanished):
            _end(process)
        for space in spaces:
            _ip("netns", "delete", space)


def _end(node: subprocess.Popen[bytes]) -> None:
    """With its first process all of its namespace."""
    if node.poll() is None:
        for first in psutil.Process(node.pid).children():
            first.kill()
    node.wait()
