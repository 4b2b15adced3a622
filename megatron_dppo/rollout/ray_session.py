"""A Ray for one run: rank 0 starts it (or joins the one in RAY_ADDRESS), the other ranks connect to it."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
import tempfile
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import ray

from megatron_dppo.compat.ray_daemons import fewer_daemons, on_loopback
from megatron_dppo.errors import UserError
from megatron_dppo.launch.nodes import environment, host_and_port, no_rank

_START_ATTEMPTS = 4

_ROOT = Path("/tmp")
_FOLDER = "dppo-ray-"
"""Ray's files lie in /tmp/dppo-ray-<process>-*/r: socket paths are limited to 107 bytes. Nobody else may enter."""

_SMALLEST_STORE = 80 << 20
"""Ray refuses less than 75 MiB."""


@dataclass(frozen=True)
class RayAddress:
    """What another rank needs to connect; plain data, to be broadcast among the ranks and to nobody else."""

    address: str
    namespace: str
    token: str | None = field(default=None, repr=False)
    """Secret of a Ray that this run started; None where the environment says how to authenticate."""


class RaySession:
    """This process's connection to Ray; the rank that started a local Ray also ends it. Leave with `close`.

    A Ray started here listens on loopback alone, asks for a token and has no dashboard. Its files are in a short
    temporary folder that goes with it, and it dies with this process even when that is killed (Ray ties its daemons to
    the process that started them).
    """

    def __init__(self, where: RayAddress, undo: ExitStack, folder: str = "") -> None:
        """`undo` is done when it has disconnected, and the folder of a Ray that it started removed."""
        self.where, self._undo, self._folder = where, undo, folder

    @staticmethod
    def start(*, namespace: str, object_store_mib: int) -> RaySession:
        """For rank 0: join the cluster in RAY_ADDRESS, or start a Ray on this machine. Works without a network.

        CPUs are not counted against anything: placement is by GPUs, and torchrun's ranks use the cores anyway.
        """
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": namespace}
        joined = os.environ.get("RAY_ADDRESS")
        if joined:
            _check_answer(joined)
            try:
                context = ray.init(address=joined, **quiet)
            except ConnectionError as error:
                raise UserError(
                    f"RAY_ADDRESS={joined}: no Ray cluster answers there ({error}); start one or unset RAY_ADDRESS"
                ) from error
            return RaySession(RayAddress(joined if joined != "auto" else context["address"], namespace), ExitStack())
        if ray.is_initialized():
            raise RuntimeError("this process is connected to Ray already; closing a second session would end the first")
        _sweep()
        _quiet_daemons()
        token = None if "RAY_AUTH_MODE" in os.environ else secrets.token_hex(32)
        undo = _authenticated(token)
        for attempt in range(1, _START_ATTEMPTS + 1):
            folder = tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-", dir=_ROOT)
            others = {child.pid for child in psutil.Process().children()}
            try:
                with no_rank("OMP_NUM_THREADS"), fewer_daemons(), on_loopback():
                    context = ray.init(
                        address="local",
                        num_cpus=max(64, os.cpu_count() or 1),
                        include_dashboard=False,
                        object_store_memory=_store_bytes(object_store_mib),
                        _temp_dir=f"{folder}/r",  # Ray makes it 0777
                        **quiet,
                    )
                undo.callback(shutil.rmtree, folder, ignore_errors=True)
                return RaySession(RayAddress(context["address"], namespace, token), undo, folder)
            except BaseException as error:
                _clear_up(folder, others)
                # Ray gives its daemons 30 s, which a busy machine may need for other things.
                if attempt == _START_ATTEMPTS or "timed out during startup" not in str(error):
                    undo.close()
                    raise
        raise AssertionError("unreachable")

    @staticmethod
    def connect(where: RayAddress) -> RaySession:
        """For the other ranks: the Ray that rank 0 started or joined. Each node needs a Ray of that cluster."""
        undo = _authenticated(where.token)
        ours = where.address.startswith("127.0.0.1:")
        with on_loopback() if ours else nullcontext():
            ray.init(address=where.address, namespace=where.namespace, log_to_driver=False, logging_level=logging.ERROR)
        return RaySession(where, undo)

    def close(self) -> None:
        """Disconnect; end the Ray that this session started, with every process of it. Idempotent."""
        ray.shutdown()
        self._undo.close()


def _check_answer(address: str) -> None:
    """Ray tries a wrong address for minutes; a connection is refused in no time."""
    if address == "auto":
        return
    if (place := host_and_port(address)) is None:
        raise UserError(f"RAY_ADDRESS={address}: expected host:port of the cluster's head, or auto")
    try:
        socket.create_connection(place, timeout=15).close()
    except (OSError, UnicodeError) as error:  # "a..b" cannot be written as a name
        raise UserError(
            f"RAY_ADDRESS={address}: no Ray cluster answers there ({error}); start one or unset RAY_ADDRESS"
        ) from error


def _authenticated(token: str | None) -> ExitStack:
    """Let this process and its children present `token`, until what this returns is closed. Ray's own default is a
    token in the home folder, which its other drivers do not find when they are given an address."""
    undo = ExitStack()
    if token is not None:
        undo.callback(_reread_authentication)
        undo.enter_context(environment({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}))
        _reread_authentication()
    return undo


def _reread_authentication() -> None:
    """Ray reads these variables when it is imported and keeps the token it found first."""
    ray._raylet.Config.initialize("")
    ray._raylet.AuthenticationTokenLoader.instance().reset_cache()


def _sweep() -> None:
    """Remove the folders of processes that were killed before they could."""
    for folder in _ROOT.glob(f"{_FOLDER}*-*"):
        owner = folder.name.removeprefix(_FOLDER).partition("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)


def _clear_up(folder: str, others: set[int]) -> None:
    """End what a failed start left: daemons are children of this process until they are up."""
    ray.shutdown()
    started = [child for child in psutil.Process().children() if child.pid not in others]
    left = [*started, *(process for child in started for process in child.children(recursive=True))]
    for child in left:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(left, timeout=10)
    shutil.rmtree(folder, ignore_errors=True)


def _store_bytes(wanted_mib: int) -> int:
    """The object store's size: as asked for, but at most half of what /dev/shm has free (Ray's minimum aside)."""
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else wanted_mib << 20
    return max(_SMALLEST_STORE, min(wanted_mib << 20, free // 2))


def _quiet_daemons() -> None:
    """Variables that Ray's processes inherit: its own chatter is off, and it leaves devices and priorities alone."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # leave the devices that a worker sees alone
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # whoever waits for a call tells its error, in one line
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # its workers for tasks, of which there are none
    os.environ.setdefault("RAY_worker_niceness", "0")  # 15 by default: the engine would yield to whoever waits for it
