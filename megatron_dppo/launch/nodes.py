"""What of the job is on this node: ranks, GPUs; and what the environment says of it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress


def ranks_in_all_and_here() -> tuple[int, int]:
    """As torchrun says; 1 and 1 in a process that it did not start, where vLLM may have set LOCAL_WORLD_SIZE alone."""
    if "WORLD_SIZE" not in os.environ:
        return 1, 1
    ranks = int(os.environ["WORLD_SIZE"])
    return ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks))


def listed_gpus() -> int:
    """GPUs that the driver lists, whether this process may use them or not; 0 without a driver."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
        return sum(line.startswith("GPU") for line in done.stdout.splitlines())
    return 0


PORTS = 1 << 16


def host_and_port(address: str) -> tuple[str, int] | None:
    """The parts of `host:port`, of `[::1]:6379` too; None where it is none."""
    host, _, port = address.rpartition(":")
    if not host or "://" in address or not port.isdecimal() or not 0 < int(port) < PORTS:
        return None
    return host.strip("[]"), int(port)


_OF_A_RANK = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)


def no_rank(*also: str) -> AbstractContextManager[None]:
    """Inside, what torchrun told this process is not in its environment, nor are the variables `also`: what is started
    there is no rank of the trainer, and would wait for its peers."""
    told = [name for name in os.environ if name in (*_OF_A_RANK, *also) or name.startswith("TORCHELASTIC_")]
    return environment(dict.fromkeys(told))


@contextmanager
def environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Inside, these variables have these values, or (None) are not there; what stood there before is put back."""
    before = {name: os.environ.get(name) for name in changes}
    _set(changes)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
