"""Nodes on this machine: each has a network, a host name, processes, /tmp and /dev/shm of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path("/mnt")
"""Where every node sees the folder that they share; their /tmp is their own."""
_UNSHARE = ("unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc")
_NODE = """
set -e
ip link set lo up
hostname "$NODE_NAME"
mount --bind "$SHARED_FOLDER" /mnt
printf '127.0.0.1 localhost\\n127.0.1.1 %s\\n10.77.0.1 node0\\n10.77.0.2 node1\\n' "$NODE_NAME" >/mnt/hosts-"$NODE_NAME"
mount --bind /mnt/hosts-"$NODE_NAME" /etc/hosts
mount -t tmpfs tmpfs /tmp
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
    tried = subprocess.run(["ip", "netns", "add", "dppo-try"], capture_output=True, text=True, check=False)
    if tried.returncode == 0:
        inside = ["ip", "netns", "exec", "dppo-try", *_UNSHARE, "true"]
        tried = subprocess.run(inside, capture_output=True, text=True, check=False)
        subprocess.run(["ip", "netns", "delete", "dppo-try"], check=False)
    return f"namespaces are not permitted: {tried.stderr.strip()}" if tried.returncode else ""


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

    def log(self, node: int) -> Path:
        return self.folder / f"node-{node}.log"

    def start(self, node: int) -> None:
        """The one command of a node."""
        environment = os.environ | {
            **{"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_AUTH_TOKEN": "5" * 64},
            **{"NODES": str(self.count), "NODE_RANK": str(node), "HEAD_ADDRESS": "10.77.0.1", "NPROC_PER_NODE": "1"},
            **{"RUN_DIR": f"{SHARED}/run", "MODEL_DIR": f"{SHARED}/model", "RAY_STORE_BYTES": str(128 << 20)},
            **{"NODE_NAME": f"node{node}", "SHARED_FOLDER": str(self.folder), "SEEN_AFTER_S": "5"},
            **{"START": str(ROOT / "docker/start_node.sh")},
            **self.variables,
        }
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "VLLM_HOST_IP", "RAY_ADDRESS", "TMPDIR"):
            environment.pop(name, None)
        inside = ["ip", "netns", "exec", f"dppo-{node}", *_UNSHARE]
        with open(self.log(node), "ab") as log:
            command = [*inside, "bash", "-c", _NODE, "node", *self.arguments]
            self.running[node] = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def kill(self, node: int) -> None:
        """The whole node at once, as when its power goes: no process of it says good-bye, no connection is closed."""
        _ip("-n", f"dppo-{node}", "link", "set", f"dppo{node}", "down")
        outer = psutil.Process(self.running[node].pid)
        for first in outer.children():
            first.kill()  # and with it all of its namespace
        self.running.pop(node).wait()
        self.mend(node)

    def cut(self, node: int) -> None:
        _ip("-n", f"dppo-{node}", "link", "set", f"dppo{node}", "down")

    def mend(self, node: int) -> None:
        _ip("-n", f"dppo-{node}", "link", "set", f"dppo{node}", "up")

    def processes(self, node: int) -> list[psutil.Process]:
        return psutil.Process(self.running[node].pid).children(recursive=True)

    def wait(self, seconds: float) -> list[int]:
        """Exit statuses."""
        end = time.monotonic() + seconds
        return [self.running[node].wait(timeout=max(1.0, end - time.monotonic())) for node in sorted(self.running)]

    def left(self, node: int) -> list[str]:
        """What an ended node had in /dev/shm, and processes, when the start script was done."""
        return (self.folder / f"left-node{node}").read_text().split("\n")[:-1]

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
    for node in (0, 1):
        subprocess.run(["ip", "netns", "delete", f"dppo-{node}"], capture_output=True, check=False)
        _ip("netns", "add", f"dppo-{node}")
    _ip("link", "add", "dppo0", "netns", "dppo-0", "type", "veth", "peer", "name", "dppo1", "netns", "dppo-1")
    for node in (0, 1):
        _ip("-n", f"dppo-{node}", "address", "add", f"10.77.0.{node + 1}/24", "dev", f"dppo{node}")
        nodes.mend(node)
    try:
        yield nodes
    finally:
        for process in nodes.running.values():
            if process.poll() is None:
                for first in psutil.Process(process.pid).children():
                    first.send_signal(signal.SIGKILL)
                process.wait()
        for node in (0, 1):
            _ip("netns", "delete", f"dppo-{node}")
