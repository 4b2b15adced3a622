"""Limits of the machine: files, shared memory, locked memory."""

from __future__ import annotations

import os
import resource
import shutil
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron_dppo.preflight.finding import Finding, error, ok, warning
from megatron_dppo.tasks.workers import sandbox

MIB = 1 << 20
OPEN_FILES = 4096
"""Ray and a rank's checkpoints and sockets; the default of 1,024 runs out on nodes of eight GPUs."""
SHARED_MEMORY_MIB = 256
"""Ray's smallest object store and torch's and NCCL's own segments."""
INFINIBAND = Path("/sys/class/infiniband")


def check_files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        how = f"ulimit -n {max(OPEN_FILES, hard)}"
        yield error("open-files", f"a process may open {soft} files", f"raise the limit: `{how}`, or LimitNOFILE")


def check_shared_memory(wanted_mib: int = SHARED_MEMORY_MIB) -> Iterator[Finding]:
    """/dev/shm holds Ray's object store (`wanted_mib` is what a configuration asks for)."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        yield error("shared-memory", "/dev/shm does not exist", "mount a tmpfs there")
        return
    free = shutil.disk_usage(folder).free // MIB
    if free < wanted_mib:
        yield error(
            "shared-memory",
            f"/dev/shm has {free} MiB free of {wanted_mib} wanted",
            "give the container --shm-size (Kubernetes: an emptyDir in memory), or lower rollout.object_store_mib",
        )


def check_locked_memory() -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if INFINIBAND.is_dir() and any(INFINIBAND.iterdir()) and soft != resource.RLIM_INFINITY:
        yield error(
            "locked-memory",
            f"InfiniBand is there, but a process may lock only {soft // 1024} KiB: NCCL falls back to sockets or fails",
            "ulimit -l unlimited (docker: --ulimit memlock=-1; Kubernetes: the capability IPC_LOCK)",
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
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = environment.get(variable, "")
        # NCCL's forms: a list of prefixes, `=name` for an exact one, `^name` for all others.
        if not value or value.startswith("^"):
            continue
        wanted = [name.lstrip("=") for name in value.split(",")]
        if not any(name.startswith(prefix) for name in known for prefix in wanted):
            yield error(
                "interfaces",
                f"{variable}={value} names no network interface of this machine ({', '.join(known)})",
                f"set it to one of them, or unset {variable}",
            )


def check_rendezvous(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """The rendezvous' host must have an address."""
    host = environment.get("MASTER_ADDR", "")
    if not host:
        return
    try:
        socket.getaddrinfo(host, None)
    except OSError as problem:
        yield error(
            "rendezvous", f"MASTER_ADDR={host} has no address ({problem})", "use the first node's name or address"
        )


def check_ray(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """A Ray cluster that the environment names must answer."""
    address = environment.get("RAY_ADDRESS", "")
    if not address or address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "://" in address:
        yield error("ray", f"RAY_ADDRESS={address} is no host:port", "set it to the head's address, or unset it")
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as problem:
        yield error(
            "ray", f"RAY_ADDRESS={address}: nothing answers ({problem})", "start the cluster, or unset RAY_ADDRESS"
        )
    if not environment.get("RAY_AUTH_TOKEN") and environment.get("RAY_AUTH_MODE") != "token":
        yield warning(
            "ray-authentication",
            f"the cluster at {address} is used without a token: whoever reaches its ports can run code on it",
            "set RAY_AUTH_MODE=token and the same RAY_AUTH_TOKEN on all nodes",
        )
