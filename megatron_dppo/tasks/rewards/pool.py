"""Worker processes for rewards that may hang, crash or leak: each answer has its time, and no more."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Protocol

from megatron_dppo.errors import UserError
from megatron_dppo.tasks.rewards.verdict import Answered, Verdict

START_TIMEOUT_S = 300.0
"""For a worker's imports, on a machine under load."""


class Judge(Protocol):
    """What a worker runs: plain data that can be pickled, with the code beside it."""

    def prepare(self) -> None: ...

    def __call__(self, item: Answered) -> Verdict: ...


@dataclass(frozen=True)
class TimedJudge:
    """A judge, and the seconds after which its worker is killed."""

    judge: Judge
    timeout_s: float


class Judges(Protocol):
    """Somewhere judges run: `JudgePool` on this machine, `RayJudges` on the nodes of a Ray cluster."""

    def judge(self, tasks: Sequence[tuple[str, Answered]]) -> list[Verdict]: ...

    def close(self) -> None: ...


class MakeJudges(Protocol):
    """Makes such a place for these judges, by name."""

    def __call__(self, judges: Mapping[str, TimedJudge], *, workers: int, memory_mib: int) -> Judges: ...


class JudgePool:
    """Runs judges in `workers` processes. A process that takes too long for one answer is killed and replaced; the
    others go on meanwhile, so `judge` takes at most the time limits divided among the workers.

    Processes start with the first call, see the current folder first on their path, and are limited to `memory_mib`
    of address space each. They end with `close`, when the pool is garbage, and with this process. Calls of `judge` may
    come from several threads (steps that are sampled ahead, an evaluation meanwhile); they take turns.
    """

    def __init__(self, judges: Mapping[str, TimedJudge], *, workers: int, memory_mib: int) -> None:
        self._judges, self._size, self._memory = dict(judges), workers, memory_mib << 20
        self._workers: list[_Worker] = []
        self._turn = threading.Lock()
        self._finalizer = weakref.finalize(self, _kill_all, self._workers)

    def judge(self, tasks: Sequence[tuple[str, Answered]]) -> list[Verdict]:
        """The verdicts on `(name of the judge, item)`, in order.

        Raises UserError where a judge cannot be loaded or has broken its contract, RuntimeError where workers do not
        start.
        """
        verdicts: list[Verdict | None] = [None] * len(tasks)
        waiting = deque(range(len(tasks)))
        with self._turn:
            try:
                while waiting or any(worker.task is not None for worker in self._workers):
                    self._hand_out(tasks, waiting)
                    self._take_in(verdicts)
            except BaseException:
                self.close()  # what is under way would answer the next call
                raise
        return [verdict for verdict in verdicts if verdict is not None]

    def close(self) -> None:
        """End all workers. The pool starts new ones if it is used again."""
        _kill_all(self._workers)

    def _hand_out(self, tasks: Sequence[tuple[str, Answered]], waiting: deque[int]) -> None:
        while len(self._workers) < min(self._size, len(waiting)):
            judges = {name: timed.judge for name, timed in self._judges.items()}
            self._workers.append(_Worker(judges, self._memory))
        for worker in self._workers:
            if waiting and worker.ready and worker.task is None:
                number = waiting.popleft()
                worker.give(number, tasks[number], self._judges[tasks[number][0]].timeout_s)

    def _take_in(self, verdicts: list[Verdict | None]) -> None:
        """Wait for the next answer or deadline, and deal with everything that has come."""
        busy = {worker.connection: worker for worker in self._workers if not worker.ready or worker.task is not None}
        if not busy:
            return
        first = min(worker.deadline for worker in busy.values())
        for connection in wait(list(busy), timeout=max(0.0, first - time.monotonic())):
            worker = busy[connection]  # type: ignore[index]
            try:
                answer = worker.connection.recv()
            except (EOFError, OSError):
                status = worker.process.wait()
                if worker.task is None:
                    raise RuntimeError(f"a reward worker ended with status {status} while it started") from None
                verdicts[worker.task] = Verdict(score=0.0, error=f"its worker process ended with status {status}")
                self._discard(worker)
                continue
            if isinstance(answer, UserError):
                raise answer
            if worker.ready:
                assert worker.task is not None
                verdicts[worker.task] = answer
                worker.task = None
            worker.ready = True
        now = time.monotonic()
        for worker in [w for w in busy.values() if w in self._workers and w.deadline <= now]:
            if not worker.ready:
                raise RuntimeError(f"a reward worker did not start within {START_TIMEOUT_S:.0f} s")
            if worker.task is not None:
                limit = worker.limit
                verdicts[worker.task] = Verdict(score=0.0, error=f"killed after {limit:g} s", timed_out=True)
                self._discard(worker)

    def _discard(self, worker: _Worker) -> None:
        worker.kill()
        self._workers.remove(worker)


_STARTER = ThreadPoolExecutor(1, thread_name_prefix="reward-workers")
"""Starts the workers. They ask Linux to end them with their parent, which to Linux is the thread that started them; a
caller's thread may end long before the process does."""


class _Worker:
    """One process and the connection to it."""

    def __init__(self, judges: Mapping[str, Judge], memory_bytes: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            command = [sys.executable, "-m", "megatron_dppo.tasks.rewards.worker", str(number)]
            self.process = _STARTER.submit(
                lambda: subprocess.Popen(command, pass_fds=[number], stdin=subprocess.DEVNULL)
            ).result()
        self.connection = Connection(ours.detach())
        self.ready = False
        self.task: int | None = None
        self.limit = START_TIMEOUT_S
        self.deadline = time.monotonic() + START_TIMEOUT_S
        self.connection.send((dict(judges), memory_bytes))

    def give(self, number: int, task: tuple[str, Answered], limit: float) -> None:
        self.task, self.limit = number, limit
        self.deadline = time.monotonic() + limit
        with suppress(BrokenPipeError, ConnectionResetError):  # the answer will be the end of the connection
            self.connection.send(task)

    def kill(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()


def _kill_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().kill()
