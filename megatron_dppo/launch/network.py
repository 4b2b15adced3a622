"""Which addresses a job listens on: loopback alone where all of it is on one machine, else the one that leads to the
other nodes. Whoever reaches torch's store or Ray can run code as the user, see docs/security.md."""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed as dist

from megatron_dppo.launch.nodes import ranks_in_all_and_here

LOOPBACK = "127.0.0.1"
_LOG = logging.getLogger(__name__)


def one_machine() -> bool:
    """Whether all ranks are here, and the engines, which are where Ray is."""
    ranks, here = ranks_in_all_and_here()
    return ranks == here and not os.environ.get("RAY_ADDRESS")


def stay_on_loopback() -> None:
    """Let gloo, NCCL and vLLM of this process, and of those it starts, listen on loopback where the job is on one
    machine. What the environment names stays."""
    if one_machine():
        os.environ.setdefault("VLLM_HOST_IP", LOOPBACK)
        for name, value in interface_variables(LOOPBACK).items():
            os.environ.setdefault(name, value)


def interface_variables(address: str) -> dict[str, str]:
    """What lets gloo and NCCL take the interface that has `address`."""
    named = (name for name, own in psutil.net_if_addrs().items() if any(one.address == address for one in own))
    return {variable: name for name in named for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}


def own_address() -> str:
    """An address of this machine that the rest of the job reaches: loopback on one machine; else that of the interface
    GLOO_SOCKET_IFNAME names, or of the one that leads to the default route."""
    if one_machine():
        return LOOPBACK
    named = psutil.net_if_addrs().get(os.environ.get("GLOO_SOCKET_IFNAME", ""), [])
    if addresses := [one.address for one in named if one.family == socket.AF_INET]:
        return addresses[0]
    try:
        return address_towards("192.0.2.1", 9)
    except OSError:
        return LOOPBACK


def address_towards(host: str, port: int) -> str:
    """The address of this machine on the way to `host`. Raises OSError where there is no way, or no such host."""
    to = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_DGRAM)[0][4]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(to)  # sends nothing: a datagram socket only picks its interface
        return str(probe.getsockname()[0])


def bound_store(host: str, port: int = 0, *, timeout: timedelta = timedelta(minutes=5)) -> dist.TCPStore:
    """A store that listens on the address of `host` alone; torch's own listens on all interfaces. Raises OSError where
    it is no address of this machine, or the port is taken."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(2048)
        found = listening.getsockname()[1]
        return dist.TCPStore(
            host, found, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listening.detach()
        )


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """What `call` returns or raises. Where it takes longer it is left behind in a thread, and DistNetworkError raised
    as by a closed connection: a call of a store, or NCCL's first, has no end where who has to answer is gone."""
    answers: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put((call(), None))
        except Exception as error:
            answers.put((None, error))

    threading.Thread(target=ask, daemon=True, name="within").start()
    try:
        value, error = answers.get(timeout=seconds)
    except queue.Empty:
        raise dist.DistNetworkError(f"no answer within {seconds:.0f} s") from None
    if error is not None:
        raise error
    return value


def init_process_group(backend: str, timeout: timedelta) -> None:
    """torch's, for the ranks that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT tell of. The store is the launcher's
    where it has one (torchrun, ours), else rank 0's, on MASTER_ADDR alone."""
    stay_on_loopback()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or rank != 0:
        dist.init_process_group(backend, timeout=timeout)
        return
    try:
        store: dist.Store = bound_store(host, port, timeout=timeout)
    except OSError as error:
        _LOG.warning("MASTER_ADDR=%s: %s; torch's store listens on all interfaces", host, error)
        dist.init_process_group(backend, timeout=timeout)
        return
    # The prefix that torch gives the other ranks' keys.
    store = dist.PrefixStore("default_pg", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
