"""A Ray for one run: rank 0 starts it (or joins the one in RAY_ADDRESS), the other ranks connect to the same address."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import psutil
import ray
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available

from megatron_dppo.errors import UserError

_START_ATTEMPTS = 4
_AUTH_MODE = "RAY_AUTH_MODE"

_SMALLEST_STORE = 80 << 20
"""Ray refuses less than 75 MiB."""

_TORCHRUN = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS",
)  # fmt: skip
"""What torchrun gives its ranks. Ray's processes inherit our environment, and an engine is no rank of the trainer."""


@dataclass(frozen=True)
class RayAddress:
    """What another rank needs to connect; plain data, to be broadcast."""

    address: str
    namespace: str
    auth_mode: str | None
    """RAY_AUTH_MODE of the cluster: a Ray started here asks for the token in the user's home by default, and whoever
    connects by address must say that it has one."""


class RaySession:
    """This process's connection to Ray; the rank that started a local Ray also ends it. Leave with `close` or `with`.

    A Ray started here has no dashboard, keeps its files in a short temporary folder that goes with it, and dies with
    this process even when that is killed (Ray ties its daemons to the process that started them).
    """

    def __init__(self, where: RayAddress, folder: str | None) -> None:
        self.where = where
        self._folder = folder

    @staticmethod
    def start(*, namespace: str, object_store_mib: int) -> RaySession:
        """For rank 0: join the cluster in RAY_ADDRESS, or start a Ray on this machine. Works without a network.

        CPUs are not counted against anything: placement is by GPUs, and torchrun's ranks use the cores anyway.
        """
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": namespace}
        joined = os.environ.get("RAY_ADDRESS")
        if joined:
            try:
                context = ray.init(address=joined, **quiet)
            except ConnectionError as error:
                raise UserError(
                    f"RAY_ADDRESS={joined}: no Ray cluster answers there ({error}); start one or unset RAY_ADDRESS"
                ) from error
            return RaySession(_address(joined if joined != "auto" else context["address"], namespace), None)
        for attempt in range(1, _START_ATTEMPTS + 1):
            folder = tempfile.mkdtemp(prefix="dppo-ray-", dir="/tmp")  # socket paths are limited to 107 bytes
            others = {child.pid for child in psutil.Process().children()}
            try:
                with _environment_of_a_daemon():
                    context = ray.init(
                        address="local",
                        num_cpus=max(64, os.cpu_count() or 1),
                        include_dashboard=False,
                        object_store_memory=_store_bytes(object_store_mib),
                        _temp_dir=folder,
                        **quiet,
                    )
                return RaySession(_address(context["address"], namespace), folder)
            except BaseException as error:
                _clear_up(folder, others)
                # Ray gives its daemons 30 s, which a busy machine may need for other things.
                if attempt == _START_ATTEMPTS or "timed out during startup" not in str(error):
                    raise
        raise AssertionError("unreachable")

    @staticmethod
    def connect(where: RayAddress) -> RaySession:
        """For the other ranks: the Ray that rank 0 started or joined. Each node needs a Ray of that cluster."""
        if where.auth_mode == "token":
            # Ray reads its mode once, at import; this is what it calls itself when it finds a local cluster.
            maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
        ray.init(
            address=where.address, namespace=where.namespace, log_to_driver=False, logging_level=logging.ERROR
        )
        return RaySession(where, None)

    def close(self) -> None:
        """Disconnect; end the Ray that this session started, with every process of it. Idempotent."""
        ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def __enter__(self) -> RaySession:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _address(address: str, namespace: str) -> RayAddress:
    return RayAddress(address, namespace, os.environ.get(_AUTH_MODE))


def _clear_up(folder: str, others: set[int]) -> None:
    """End what a failed start left: daemons are children of this process until they are up."""
    ray.shutdown()
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in others]
    for child in left:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(left, timeout=10)
    shutil.rmtree(folder, ignore_errors=True)


def _store_bytes(wanted_mib: int) -> int:
    """The object store's size: as asked for, but at most half of what /dev/shm has free (Ray's minimum aside)."""
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else wanted_mib << 20
    return max(_SMALLEST_STORE, min(wanted_mib << 20, free // 2))


@contextmanager
def _environment_of_a_daemon() -> Iterator[None]:
    """The environment without torchrun's variables, and with Ray's own chatter off."""
    names = [n for n in os.environ if n in _TORCHRUN or n.startswith("TORCHELASTIC_")]
    taken = {name: os.environ.pop(name) for name in names}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        yield
    finally:
        os.environ.update(taken)
