"""Every socket that a run listens on is known, and on loopback; the one that is torchrun's own is not."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from megatron_dppo.doctor.machine import check_listening
from megatron_dppo.launch import network
from tests.processes import free_port

ROOT = Path(__file__).resolve().parents[2]
RANK, LAUNCHER = "run_tiny_moe_dppo.sh (rank)", "run_tiny_moe_dppo.sh (launcher)"
KNOWN = {RANK, LAUNCHER, "VLLM::EngineCore", "gcs_server", "raylet", "ray::DashboardAgent", "ray::RuntimeEnvAgent",
         "ray::RolloutStore", "ray::EngineHost", "ray::IDLE", "ray (starting)"}  # fmt: skip
"""torch's store (launcher), gloo and Ray's driver (ranks), vLLM's store, gloo and messages, and Ray's own."""


def listeners(process: psutil.Process) -> Iterator[tuple[str, str]]:
    """(name of the process, address) of every TCP socket that `process` or a descendant listens on."""
    for one in (process, *process.children(recursive=True)):
        try:
            found = [c.laddr.ip for c in one.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
            command = one.cmdline() or [""]
        except psutil.Error:
            continue
        yield from ((name_of(one, command), address) for address in found)


def name_of(process: psutil.Process, command: list[str]) -> str:
    first = command[0].split()[0] if command[0] else process.name()
    if first.startswith("ray::"):  # with the name of an actor, and what it does
        return "ray::" + first.removeprefix("ray::").split(":")[-1].split(".")[0]
    if first.startswith("VLLM::"):
        return first
    if Path(first).name in ("gcs_server", "raylet"):
        return Path(first).name
    if any(part.endswith("run_tiny_moe_dppo.sh") for part in command):
        if any("torchrun" in part or part == "torch.distributed.run" for part in command):
            return "torchrun"
        return RANK if "-u" in command else LAUNCHER
    return "ray (starting)" if any("/ray/" in part for part in command) else " ".join(command)


@pytest.mark.full
@pytest.mark.parametrize("start", ["bash", "torchrun"])
def test_every_listening_socket_of_the_demo_is_known(start: str, tmp_path: Path) -> None:
    script = str(ROOT / "examples/run_tiny_moe_dppo.sh")
    small = ["trainer.steps=1", "trainer.prompts_per_step=8", "trainer.prompts_per_mini_batch=8", "evaluation.every=0",
             "trainer.export_hugging_face=false", "trainer.parity_check=false"]  # fmt: skip
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = ["bash", script] if start == "bash" else [*torchrun, script]
    settings = {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    folders = {"RUN_DIR": str(tmp_path / "run"), "MODEL_DIR": str(tmp_path / "model")}
    unset = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "VLLM_HOST_IP", "RAY_ADDRESS", "RAY_AUTH_MODE")
    environment = {k: v for k, v in os.environ.items() if k not in unset} | settings | folders
    seen: set[tuple[str, str]] = set()
    modes: set[int] = set()
    with open(tmp_path / "out", "wb") as out:
        run = subprocess.Popen([*command, *small], env=environment, stdout=out, stderr=out)
        while run.poll() is None:
            seen |= set(listeners(psutil.Process(run.pid)))
            ranks = [child.pid for child in psutil.Process(run.pid).children(recursive=True)]
            for folder in (f for pid in ranks for f in Path("/tmp").glob(f"dppo-ray-{pid}-*")):
                modes.add(stat.S_IMODE(folder.stat().st_mode))
            time.sleep(0.2)
    assert run.returncode == 0, (tmp_path / "out").read_text()[-3000:]
    names = {name for name, _ in seen}
    assert {RANK, "VLLM::EngineCore", "gcs_server", "raylet", "ray::EngineHost"} <= names
    assert names <= KNOWN | ({"torchrun"} if start == "torchrun" else set())
    open_to_all = {name for name, address in seen if address not in ("127.0.0.1", "::ffff:127.0.0.1", "::1")}
    assert open_to_all == ({"torchrun"} if start == "torchrun" else set())
    assert modes == {0o700}


def listening_at(port: int) -> set[str]:
    connections = psutil.Process().net_connections("tcp")
    return {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.port == port}


def test_a_store_listens_on_its_address_alone() -> None:
    store = network.bound_store("127.0.0.1")
    assert listening_at(store.port) == {"127.0.0.1"}
    other = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=60))
    other.set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(OSError, match="in use"):
        network.bound_store("127.0.0.1", store.port)
    with pytest.raises(OSError):
        network.bound_store("192.0.2.77")  # nobody's


def test_addresses_of_one_machine_and_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "RAY_ADDRESS",
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
        "VLLM_HOST_IP",
    ):
        monkeypatch.setenv(name, "")  # so that what is set below goes again
        monkeypatch.delenv(name)
    assert network.own_address() == "127.0.0.1"
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    network.stay_on_loopback()
    assert not {"GLOO_SOCKET_IFNAME", "VLLM_HOST_IP"} & os.environ.keys()
    named, at = next(
        (name, a.address) for name, all_ in psutil.net_if_addrs().items() for a in all_ if a.family == socket.AF_INET
    )
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", named)
    assert network.own_address() == at
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "theirs")
    network.stay_on_loopback()
    loopback = next(n for n, all_ in psutil.net_if_addrs().items() if any(a.address == "127.0.0.1" for a in all_))
    assert os.environ["VLLM_HOST_IP"] == "127.0.0.1"
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("theirs", loopback)


def test_the_doctor_says_that_torchruns_store_is_open() -> None:
    assert list(check_listening({})) == []
    (found,) = check_listening({"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "MASTER_PORT": "29500"})
    assert (found.level, found.check) == ("ok", "listening")
    assert "port 29500 on all interfaces" in found.problem


def test_ranks_that_no_torchrun_started_meet() -> None:
    """As srun or mpirun start them: the variables alone. Rank 0's store listens on MASTER_ADDR alone."""
    body = (
        "import os, psutil, torch, torch.distributed as dist; from datetime import timedelta\n"
        "from megatron_dppo.launch.network import init_process_group\n"
        "init_process_group('gloo', timedelta(seconds=60))\n"
        "one = torch.ones(1); dist.all_reduce(one); port = int(os.environ['MASTER_PORT'])\n"
        "sockets = [c for c in psutil.Process().net_connections('tcp') if c.status == 'LISTEN']\n"
        "print(int(one), [c.laddr.ip for c in sockets if c.laddr.port == port]); dist.destroy_process_group()"
    )
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    plain = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    ranks = [
        subprocess.Popen([sys.executable, "-c", body], env=plain | where | {"RANK": str(rank)}, stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=300)[0].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert said == ["2 ['127.0.0.1']\n", "2 []\n"]


def test_an_engines_store_listens_on_its_address_alone_at_a_port_that_is_kept() -> None:
    """As vLLM's workers meet, in processes of their own: what is replaced stays. vLLM finds the port, a worker listens
    there seconds later."""
    meet = """
import socket, subprocess, sys, psutil, torch.distributed as dist
from megatron_dppo.compat.vllm_plugin import bind_stores, keep_ports

def meet(port, rank, ranks):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    dist.barrier()

bind_stores(); bind_stores()
"""
    alone = """
other = socket.create_server(("127.0.0.1", 0))
port = other.getsockname()[1]
meet(port, 0, 1)
"""
    two = """
keep_ports(); keep_ports()
from vllm.v1.executor.multiproc_executor import get_open_port
port = get_open_port()
try:
    socket.socket().bind(("", port))
    print("another process has taken it")
except OSError as error:
    print(error.strerror)
second = subprocess.Popen([sys.executable, "-c", sys.argv[1] + f"meet({port}, 1, 2)"])
meet(port, 0, 2)
print(port in {c.laddr.port for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"}, second.wait())
"""
    listening = """
print({c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"})
"""
    loopback = next(n for n, all_ in psutil.net_if_addrs().items() if any(a.address == "127.0.0.1" for a in all_))
    for body, expected in ((alone, ""), (two, "Address already in use\nTrue 0\n")):
        command = [sys.executable, "-c", meet + body + listening, meet]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": loopback, "VLLM_LOGGING_LEVEL": "ERROR"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
        assert done.stdout == expected + "{'127.0.0.1'}\n", done.stderr[-2000:]
