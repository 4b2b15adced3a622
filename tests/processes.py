"""Other processes of this machine, which come and go while a test looks at them, and ports that none of them has."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from megatron_dppo.rollout.engine import EngineClient, RolloutEngine


def command_of(process: psutil.Process) -> str:
    """Its name and command line; "" for one that has ended since it was listed, a zombie too."""
    with suppress(psutil.NoSuchProcess):
        return " ".join([process.name(), *process.cmdline()])
    return ""


def processes_of(client: EngineClient) -> list[int]:
    """Process ids where an engine lives: its host's, then those of its core and of the core's workers."""

    def ids(engine: RolloutEngine) -> list[int]:  # in here, so that it goes to a process that may not import tests
        host = psutil.Process()
        return [host.pid, *(child.pid for child in host.children(recursive=True))]

    return client.ask(ids, "control").result()


def free_port() -> int:
    """A port on loopback that nobody has. It is none of those that Linux gives to whoever asks for any (from 32768 on)
    or that Ray takes (below 20000): no other process has it before the test listens there."""
    while True:
        port = random.SystemRandom().randrange(20000, 29000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
