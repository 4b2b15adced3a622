"""The worker: `python -m megatron_dppo.tasks.workers.supervisor FD`, started by `Workers` with a clean environment.

    trainer ── pickled calls ──►  supervisor  ── calls ──►  process that may be hostile
            ◄── bounded JSON ──   never runs  ◄─ bytes ──   forked from the supervisor, ready for work, and then
                                  model text                locked down for good

The supervisor imports what the services need once, and forks. A process that evaluates a model's text lives for that
one answer, so that it can touch no other, and reaches nothing but its end of a socket: number and secret of the call
stay here. (Hostile text shares its interpreter with the code that scores it. The most that it can do is to say
something false about its own answer, within the bounds of the reward.) A process that answers twice, in another form,
too late or too much is killed, and nothing that it said counts.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import random
import resource
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from megatron_dppo.errors import UserError
from megatron_dppo.tasks.workers.calls import HEADER, LARGEST_REPLY, Asked, Call, Channel, Closed, Hosted, Start
from megatron_dppo.tasks.workers.sandbox import (
    Limits,
    adopt_orphans,
    code_folders,
    die_with_parent,
    guard_supervisor,
    lock_down,
    nobody,
    without_home,
)

FOLDER_BYTES, FOLDER_FILES = 64 << 20, 1000
"""What a locked process may write in all; it is killed beyond (looked at every `_LOOK_S`)."""
_LOOK_S = 0.05


class _Stop(BaseException):
    """SIGTERM, or the death of whoever started this."""


@dataclass
class _Process:
    pid: int
    channel: Channel
    folder: Path
    hosted: Hosted
    asked: Asked | None = None
    deadline: float = 0.0
    said: bytes | None = None
    """A single-call process answers when it has ended."""


class Supervisor:
    """Runs calls at the same time, each in its process, and kills at their deadlines."""

    def __init__(self, trainer: Channel, start: Start, folder: str) -> None:
        """`folder` will hold one for each process."""
        self._trainer, self._start, self._folder = trainer, start, folder
        self._readable = code_folders()
        self._processes: dict[str, _Process] = {}
        self._forked = 0

    def run(self) -> None:
        """Until the trainer closes the connection."""
        try:
            while True:
                self._wait()
                for name in list(self._processes):
                    self._listen(name)
                try:
                    messages = self._trainer.receive()
                except Closed:
                    return
                for message in messages:
                    asked = pickle.loads(message)
                    if isinstance(asked, str):
                        self._end(asked)
                    else:
                        self._ask(asked)
        finally:
            for name in list(self._processes):
                self._end(name)

    def _wait(self) -> None:
        """For the next message, the next deadline, or the next look at what is being written."""
        poll = select.poll()
        poll.register(self._trainer, select.POLLIN | (select.POLLOUT if self._trainer.unsent else 0))
        first = time.monotonic() + 3600
        for process in self._processes.values():
            poll.register(process.channel, select.POLLIN | (select.POLLOUT if process.channel.unsent else 0))
            if process.asked is not None:
                look = time.monotonic() + _LOOK_S if process.hosted.sandboxed else first
                first = min(first, process.deadline, look)
        poll.poll(max(0.0, first - time.monotonic()) * 1000 + 1)
        self._trainer.flush()
        for process in self._processes.values():
            process.channel.flush()

    def _ask(self, asked: Asked) -> None:
        call = asked.call
        process = self._processes.get(call.process)
        deadline = time.monotonic() + call.timeout_s
        if process is None:
            if call.opening is None:
                self._answer(asked, error="its process has ended")
                return
            process = self._processes[call.process] = self._fork(call)
        process.asked, process.deadline = asked, deadline
        process.channel.queue(pickle.dumps(call.payload))

    def _listen(self, name: str) -> None:
        process = self._processes[name]
        asked, frames, closed = process.asked, [], None
        try:
            frames = process.channel.receive()
        except Closed as found:
            closed = found
        more = len(frames) + (process.said is not None)
        if more > 1 or (frames and asked is None) or (frames and process.channel.partial):
            self._fail(name, "it answered more than it was asked")
        elif closed is not None:
            said, status = process.said, self._end(name)
            if asked is None:
                return
            if said is not None and status == 0 and not process.channel.partial and not closed.reason:
                self._answer(asked, reply=said)
            else:
                self._answer(asked, error=closed.reason or f"its worker process ended with status {status}")
        elif frames and asked is not None and not process.hosted.single:
            process.asked = None
            self._answer(asked, reply=frames[0])
        elif frames:
            process.said = frames[0]
        elif asked is not None and time.monotonic() >= process.deadline:
            self._end(name)
            self._answer(asked, error=f"killed after {asked.call.timeout_s:g} s", timed_out=True)
        elif asked is not None and process.hosted.sandboxed and (excess := _too_much(process.folder)):
            self._fail(name, excess)

    def _fail(self, name: str, why: str) -> None:
        asked = self._processes[name].asked
        self._end(name)
        if asked is not None:
            self._answer(asked, error=why)

    def _answer(self, asked: Asked, *, reply: bytes = b"", error: str = "", timed_out: bool = False) -> None:
        message = {"number": asked.number, "secret": asked.secret, "error": error, "timed_out": timed_out}
        self._trainer.queue(json.dumps(message).encode() + b"\n" + reply)

    def _end(self, name: str) -> int:
        """Kill a process with everything that it started, and remove its folder. Returns its status."""
        process = self._processes.pop(name, None)
        if process is None:
            return 0
        # One that closed its connection by ending has its status already, which this does not change.
        os.kill(process.pid, signal.SIGKILL)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        _, status = os.waitpid(process.pid, 0)
        if not process.hosted.sandboxed:
            self._end_orphans()
        process.channel.close()
        shutil.rmtree(process.folder, ignore_errors=True)
        return os.waitstatus_to_exitcode(status)

    def _end_orphans(self) -> None:
        """Children of an ended process are children of this one now; those of a living one are its own (both are
        PR_SET_CHILD_SUBREAPER)."""
        known = {process.pid for process in self._processes.values()}
        while orphans := [child for child in psutil.Process().children() if child.pid not in known]:
            for orphan in orphans:
                with suppress(psutil.NoSuchProcess):
                    orphan.kill()
                with suppress(ChildProcessError):
                    os.waitpid(orphan.pid, 0)

    def _fork(self, call: Call) -> _Process:
        hosted = self._start.services[call.service]
        self._forked += 1
        folder = Path(self._folder, str(self._forked))
        folder.mkdir(mode=0o700)
        ours, theirs = socket.socketpair()
        user = nobody()
        pid = os.fork()
        if pid == 0:
            try:
                readable = without_home([*self._readable, *hosted.readable])
                _be_the_process(theirs, call, hosted, folder, readable, self._start.memory_bytes, user)
            finally:
                os._exit(1)
        theirs.close()
        return _Process(pid, Channel(ours, LARGEST_REPLY), folder, hosted)


def _be_the_process(
    end: socket.socket, call: Call, hosted: Hosted, folder: Path, readable: list[str], memory_bytes: int, user: int
) -> None:
    """The life of a forked process. It returns when it has nothing more to say."""
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    die_with_parent()
    os.setpgid(0, 0)
    kept = os.dup2(end.fileno(), 3)
    end.detach()
    os.closerange(4, 1 << 30)
    end = socket.socket(fileno=kept)
    random.seed()  # or every process would draw the same numbers
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    handle, failed = None, ""
    try:
        handle = hosted.service.open(call.opening)
    except UserError as error:
        failed = str(error)
    except Exception as error:
        failed = f"{type(error).__name__}: {error}"
    if hosted.sandboxed:
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        os.close(nowhere)
        if os.geteuid() == 0:
            with suppress(OSError):
                os.chown(folder, user, user)
        seconds = int(call.timeout_s) + 2 if hosted.single else None
        lock_down(folder, readable, Limits(memory_bytes, seconds), user)
    else:
        adopt_orphans()
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    for payload in _payloads(end):
        reply: dict[str, Any]
        try:
            reply = {"raised": failed} if handle is None else handle(payload)
            text = json.dumps(reply).encode()
        except MemoryError:
            text = b'{"raised": "MemoryError: ran out of memory"}'
        except Exception as error:
            text = json.dumps({"raised": f"{type(error).__name__}: {error}"[:1000]}).encode()
        end.sendall(HEADER.pack(len(text)) + text)
        if hosted.single:
            os._exit(0)
    os._exit(0)


def _payloads(end: socket.socket) -> Iterator[Any]:
    """What the supervisor sends, until it closes."""
    stream = end.makefile("rb")
    while len(header := stream.read(HEADER.size)) == HEADER.size:
        yield pickle.loads(stream.read(HEADER.unpack(header)[0]))


def _too_much(folder: Path) -> str:
    """Whether more lies in `folder` than is allowed."""
    size = files = 0
    pending = [folder]
    while pending:
        with suppress(OSError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                with suppress(OSError):
                    files += 1
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(Path(entry.path))
                if size > FOLDER_BYTES or files > FOLDER_FILES:
                    return f"it wrote more than {FOLDER_BYTES >> 20} MiB or {FOLDER_FILES} files"
    return ""


def _first_message(trainer: Channel) -> Start:
    while True:
        poll = select.poll()
        poll.register(trainer, select.POLLIN)
        poll.poll()
        if messages := trainer.receive():
            start = pickle.loads(messages[0])
            assert isinstance(start, Start)
            return start


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the trainer, which ends this
    die_with_parent()
    guard_supervisor()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    trainer = Channel(socket.socket(fileno=int(sys.argv[1])), largest=1 << 31)
    try:
        start = _first_message(trainer)
    except Closed:
        return
    try:
        for hosted in start.services.values():
            hosted.service.prepare()
        ready = {"error": ""}
        gc.collect()
        gc.freeze()  # the collector would write to pages that all forks share
    except UserError as error:
        ready = {"error": str(error)}
    trainer.queue(json.dumps(ready).encode())
    if ready["error"]:
        while trainer.unsent:
            trainer.flush()
        return

    def stop(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_IGN)  # it may come twice, and behind the work
        raise _Stop

    signal.signal(signal.SIGTERM, stop)
    folder = tempfile.mkdtemp(prefix="megatron-dppo-worker-")
    try:
        try:
            die_with_parent(signal.SIGTERM)
            Supervisor(trainer, start, folder).run()
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except _Stop:
        pass
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
