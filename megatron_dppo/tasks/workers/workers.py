"""The trainer's side of the workers.

```
a caller's thread ── run ──┐ one queue: first come, first served     ┌─► worker 0 ── a process per call
another's ──────── run ──┴──► calls that wait ── free workers ──┴─► worker 1 ── ...
```
One of the callers hands out the calls of all and takes the answers in; when it has its own, another goes on.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from megatron_dppo.errors import UserError
from megatron_dppo.tasks.workers.calls import LARGEST_REPLY, Asked, Call, Channel, Closed, Hosted, Outcome, Start
from megatron_dppo.tasks.workers.sandbox import bubblewrapped, clean_environment, code_folders, rung

START_TIMEOUT_S = 300.0
"""For a worker's imports, on a machine under load."""
GRACE_S = 10.0
"""The worker itself keeps the time of a call; one that has not answered so long afterwards is killed."""


class Workers:
    """Runs calls of `services` in `size` workers, each of which keeps warm processes ready for work.

    Workers start with the first call (by `prepare` one before it) and end with `close`, when this is garbage, and with
    this process. Calls of `run` may come from several threads (groups of a step, steps that are sampled ahead, an
    evaluation meanwhile).
    """

    def __init__(
        self,
        services: Mapping[str, Hosted],
        *,
        size: int,
        memory_mib: int | None,
        environment: Sequence[str] = (),
        at_once: int | None = 1,
    ) -> None:
        """
        memory_mib   address space of each process; None where nothing limits it, which no sandbox allows
        environment  variables that workers get besides `sandbox.ENVIRONMENT`
        at_once      calls that one worker runs at the same time; None for all
        """
        self._services, self._size = dict(services), size
        self._memory = resource.RLIM_INFINITY if memory_mib is None else memory_mib << 20
        self._environment, self._at_once = tuple(environment), at_once
        self._workers: list[_Worker] = []
        self._homes: dict[str, _Worker] = {}
        self._waiting: deque[_Question] = deque()
        self._under_way: dict[int, _Question] = {}
        """By number, those that wait among them."""
        self._numbers = count()
        self._callers: dict[_Caller, None] = {}
        """In the order they came."""
        self._led = False
        """Whether a caller hands out."""
        self._lock = threading.Lock()
        """Of all that is here; never held while somebody waits for workers."""
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._news)
        self._finalizer = weakref.finalize(self, _close_all, self._workers)

    def prepare(self) -> None:
        """Start a worker, unless there is one, and wait until its services are prepared. Raises as `run` does."""
        with self._lock:
            if self._workers:
                return
            worker = self._start()
        try:
            while not worker.ready:
                poll, patience_ms = _poll_of([worker], None)
                poll.poll(patience_ms)
                worker.answers()
        except BaseException:
            worker.close()
            raise
        with self._lock:
            self._workers.append(worker)

    def run(self, calls: Sequence[Call]) -> list[Outcome]:
        """What became of `calls`, in order. Those of one process go to the worker that has it.

        Raises UserError where a service cannot be prepared, RuntimeError where workers do not start.
        """
        with self._lock:
            caller = _Caller(threading.Condition(self._lock), len(calls))
            asked = [_Question(next(self._numbers), call, caller) for call in calls]
            self._callers[caller] = None
            self._under_way |= {one.number: one for one in asked}
            self._waiting.extend(asked)
            os.eventfd_write(self._news, 1)
            try:
                while not caller.over:
                    if self._led:
                        caller.woken.wait()
                    else:
                        self._lead(caller)
            finally:  # interrupted, maybe: whoever leaves passes the lead on if nobody has it
                del self._callers[caller]
                if not self._led and self._callers:
                    next(iter(self._callers)).woken.notify()
        if caller.failed is not None:
            raise caller.failed
        return [one.outcome for one in asked if one.outcome is not None]

    def end(self, processes: Iterable[str]) -> None:
        """End these processes, if there are such; nobody waits for it."""
        with self._lock:
            for process in processes:
                worker = self._homes.pop(process, None)
                if worker is not None and not worker.over:
                    worker.end(process)
            os.eventfd_write(self._news, 1)

    def close(self) -> None:
        """End all workers; calls that are under way fail. New ones are started if this is used again."""
        with self._lock:
            self._fail(RuntimeError("the workers were closed while they were at work"))

    def _fail(self, error: BaseException) -> None:
        for caller in self._callers:
            if not caller.over:
                caller.failed = error
                caller.woken.notify()
        self._under_way.clear()
        self._waiting.clear()
        _close_all(self._workers)
        self._homes.clear()
        os.eventfd_write(self._news, 1)

    def _lead(self, mine: _Caller) -> None:
        """Hand out and take in what there is of everybody, until `mine` has all its outcomes."""
        self._led = True
        try:
            while not mine.over:
                self._hand_out()
                workers = list(self._workers)
                poll, patience_ms = _poll_of(workers, self._news)
                self._lock.release()
                try:
                    poll.poll(patience_ms)
                finally:
                    self._lock.acquire()
                with suppress(BlockingIOError):
                    os.eventfd_read(self._news)
                for worker in workers:
                    if worker in self._workers:  # nobody closed it meanwhile
                        self._take_in(worker)
        except BaseException as error:
            self._fail(error)
        finally:
            self._led = False

    def _take_in(self, worker: _Worker) -> None:
        for number, outcome in worker.answers().items():
            self._under_way.pop(number).answer(outcome)
        if worker.over:
            worker.close()
            self._workers.remove(worker)

    def _hand_out(self) -> None:
        while len(self._workers) < min(self._size, len(self._under_way)) and self._waiting:
            self._workers.append(self._start())
        while self._waiting and (worker := self._worker_for(self._waiting[0].call)):
            one = self._waiting.popleft()
            if one.call.pinned:
                self._homes[one.call.process] = worker
            worker.ask(one.number, one.call)

    def _worker_for(self, call: Call) -> _Worker | None:
        home = self._homes.get(call.process) if call.pinned else None
        if home is not None and not home.over:
            return home
        free = [worker for worker in self._workers if worker.ready and not worker.over]
        if self._at_once is not None:
            free = [worker for worker in free if len(worker.asked) < self._at_once]
        return min(free, key=lambda one: one.load, default=None)

    def _start(self) -> _Worker:
        return _Worker(Start(self._services, self._memory), clean_environment(self._environment))


@dataclass(eq=False)
class _Caller:
    """A thread in `run`. Each is woken on its own: with many callers, waking all at every answer costs more than the
    answers do."""

    woken: threading.Condition
    """When all is answered, when it failed, and to lead."""
    unanswered: int
    failed: BaseException | None = None

    @property
    def over(self) -> bool:
        return self.unanswered == 0 or self.failed is not None


@dataclass(eq=False)
class _Question:
    """A call of somebody who waits for its outcome."""

    number: int
    call: Call
    caller: _Caller
    outcome: Outcome | None = None

    def answer(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.caller.unanswered -= 1
        if self.caller.over:
            self.caller.woken.notify()


_STARTER = ThreadPoolExecutor(1, thread_name_prefix="workers")
"""Starts the workers. They ask Linux to end them with their parent, which to Linux is the thread that started them; a
caller's thread may end long before the process does."""


class _Worker:
    """One supervisor and the connection to it."""

    def __init__(self, start: Start, environment: dict[str, str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            command = [sys.executable, "-P", "-m", "megatron_dppo.tasks.workers.supervisor", str(number)]
            if rung() == "bubblewrap" and all(hosted.sandboxed for hosted in start.services.values()):
                readable = [path for hosted in start.services.values() for path in hosted.readable]
                command = bubblewrapped(command, [*code_folders(), *readable])
            self._process = _STARTER.submit(
                lambda: subprocess.Popen(
                    command, pass_fds=[number], stdin=subprocess.DEVNULL, env=environment, start_new_session=True
                )
            ).result()
        self.channel = Channel(ours, LARGEST_REPLY + 4096)
        self.ready = self.over = False
        self.asked: dict[int, Asked] = {}
        self.load = 0
        self._deadlines: list[tuple[float, int]] = []
        """A heap of times and numbers, of calls that are over among them."""
        self._starts_until = time.monotonic() + START_TIMEOUT_S
        self.channel.queue(pickle.dumps(start))

    @property
    def deadline(self) -> float:
        if not self.ready:
            return self._starts_until
        while self._deadlines and self._deadlines[0][1] not in self.asked:
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else time.monotonic() + 3600

    def ask(self, number: int, call: Call) -> None:
        asked = Asked(number, secrets.token_hex(16), call)
        self.asked[number] = asked
        self.load += 1
        # A worker forks one process after another: as many as there are calls.
        heappush(self._deadlines, (time.monotonic() + call.timeout_s + GRACE_S + len(self.asked), number))
        self.channel.queue(pickle.dumps(asked))

    def end(self, process: str) -> None:
        self.channel.queue(pickle.dumps(process))

    def answers(self) -> dict[int, Outcome]:
        """What has come, or what to say instead: `over` afterwards means that this worker is of no use any more."""
        self.channel.flush()
        found: dict[int, Outcome] = {}
        try:
            for frame in self.channel.receive():
                if not self.ready:
                    self._started(frame)
                    continue
                asked, outcome = self._read(frame)
                found[asked.number] = outcome
                del self.asked[asked.number]
        except (Closed, ValueError, KeyError, TypeError, RecursionError) as error:
            self.over = True
            status = self._stop(GRACE_S if isinstance(error, Closed) else 0.0)
            if not self.ready:
                raise RuntimeError(f"a worker ended with status {status} while it started") from None
            why = (
                f"its worker ended with status {status}"
                if isinstance(error, Closed)
                else "its worker answered what was not asked"
            )
            return found | {number: Outcome(error=why) for number in self.asked}
        if time.monotonic() >= self.deadline:
            if not self.ready:
                raise RuntimeError(f"a worker did not start within {START_TIMEOUT_S:.0f} s")
            self.over = True
            late = {number: Outcome(error="its worker did not answer in time", timed_out=True) for number in self.asked}
            return found | late
        return found

    def _started(self, frame: bytes) -> None:
        if reason := json.loads(frame)["error"]:
            raise UserError(str(reason))
        self.ready = True

    def _read(self, frame: bytes) -> tuple[Asked, Outcome]:
        """Raises ValueError, KeyError, TypeError or RecursionError for an answer to what was not asked. What the
        process itself said is taken for what it is: bytes of a stranger."""
        head, _, said = frame.partition(b"\n")
        answer = json.loads(head)
        asked = self.asked[answer["number"]]
        if not secrets.compare_digest(answer["secret"], asked.secret):
            raise ValueError("another call's answer")
        if answer["error"]:
            return asked, Outcome(error=str(answer["error"]), timed_out=answer["timed_out"] is True)
        try:
            reply = json.loads(said)
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict):
            return asked, Outcome(error="what its process answered cannot be read")
        if "raised" in reply:
            return asked, Outcome(error=printable(str(reply["raised"])))
        return asked, Outcome(reply=reply)

    def close(self) -> None:
        """The supervisor removes what it started when it finds the connection closed; otherwise its group is killed."""
        self._stop(GRACE_S if self.ready and not self.over else 0.0)

    def _stop(self, patience: float) -> int:
        self.channel.close()
        with suppress(subprocess.TimeoutExpired):
            if patience:
                self._process.wait(patience)
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()


def printable(text: str, most: int = 500) -> str:
    """`text` as it may stand in a log: one line, no control characters, no half of a character, and not long."""
    text = text[:most].encode(errors="backslashreplace").decode()
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _poll_of(workers: Sequence[_Worker], news: int | None) -> tuple[select.poll, float]:
    """What ends when one of them has something to say, or there is news; and the milliseconds until a time is up."""
    poll = select.poll()
    if news is not None:
        poll.register(news, select.POLLIN)
    for worker in workers:
        poll.register(worker.channel, select.POLLIN | (select.POLLOUT if worker.channel.unsent else 0))
    first = min(worker.deadline for worker in workers)
    return poll, max(0.0, first - time.monotonic()) * 1000 + 1


def _close_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().close()
