"""The process that judges: `python -m megatron_dppo.tasks.rewards.worker FD`, started by the pool.

Over the connection FD it is sent the judges, by name, and a memory limit; it answers `None`, or the error that keeps
it from working. Then it is sent `(name, item)` and answers a `Verdict` or a `UserError`, until the connection closes.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from multiprocessing.connection import Connection

from megatron_dppo.errors import UserError
from megatron_dppo.tasks.rewards.verdict import Verdict

_PR_SET_PDEATHSIG = 1


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the trainer, which ends this
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    sys.path.insert(0, os.getcwd())
    connection = Connection(int(sys.argv[1]))
    try:
        judges, memory_bytes = connection.recv()
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        try:
            for judge in judges.values():
                judge.prepare()
        except UserError as error:
            connection.send(error)
            return
        connection.send(None)
        while True:
            name, item = connection.recv()
            try:
                connection.send(judges[name](item))
            except UserError as error:
                connection.send(error)
            except MemoryError:
                connection.send(Verdict(score=0.0, error="ran out of memory"))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


if __name__ == "__main__":
    main()
