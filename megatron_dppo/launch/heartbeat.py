"""Signs of life of every rank, the stacks of one that shows none, and a health check of containers:
`python -m megatron_dppo.launch.heartbeat FOLDER`."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from megatron_dppo.errors import file_errors
from megatron_dppo.launch.secrets import redact

FOLDER, STACKS = "heartbeats", "stacks"
"""Of the run's folder."""
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Beat:
    """The last sign of a rank. Times are seconds since the epoch."""

    rank: int
    host: str
    pid: int
    phase: str
    step: int
    since: float
    """When the phase began."""
    limit: float
    """Seconds a phase may take before the rank counts as hung."""

    @property
    def alive(self) -> bool:
        """Whether the process that wrote it lives. Only of this host's: numbers of processes are used again."""
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self.pid).create_time() <= self.since + 5.0  # clocks are set now and then
        return False

    @property
    def overdue(self) -> float:
        """Seconds past the limit; negative while there is time."""
        return time.time() - self.since - self.limit


class Heartbeat:
    """Written at every change of phase; a watchdog in C (faulthandler) writes the stacks of all threads when a phase
    takes longer than `limit` seconds, even where Python itself is stuck.

    A rank in a collective waits for the slowest: the culprit is the one whose step and phase are behind the others'.
    With `watch_peers` (rank 0) a thread names it, and dumps the stacks of this rank's child processes, the engines,
    too.
    """

    def __init__(self, folder: Path, rank: int, *, limit: float, watch_peers: bool = False) -> None:
        self._folder, self._rank, self._limit, self._watch_peers = folder, rank, limit, watch_peers
        self._file = folder / FOLDER / f"rank-{rank:05d}.json"
        self._stacks = folder / STACKS / f"rank-{rank:05d}.txt"
        self._over = threading.Event()

    @contextmanager
    def running(self) -> Iterator[Heartbeat]:
        """Beats count inside; afterwards the rank's file is gone, so that a finished run looks healthy."""
        for folder in (self._file.parent, self._stacks.parent):
            with file_errors(f"{folder} cannot be made", "choose another run.dir"):
                folder.mkdir(parents=True, exist_ok=True)
        with file_errors(f"{self._stacks} cannot be written", "choose another run.dir"):
            stream = open(self._stacks, "a")  # noqa: SIM115  (below)
        watcher = threading.Thread(target=self._watch, daemon=True, name="heartbeat")
        with stream as stacks:
            self._stream = stacks
            self.beat("starting", 0)
            if self._watch_peers:
                watcher.start()
            try:
                yield self
            finally:
                self._over.set()
                faulthandler.cancel_dump_traceback_later()
                if self._watch_peers:
                    watcher.join(timeout=10)
                self._file.unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    if not self._stacks.stat().st_size:
                        self._stacks.unlink()

    def beat(self, phase: str, step: int) -> None:
        """The rank begins `phase` of `step`."""
        beat = Beat(self._rank, socket.gethostname(), os.getpid(), phase, step, time.time(), self._limit)
        partial = self._file.with_suffix(".partial")
        try:
            partial.write_text(json.dumps(vars(beat)))
            partial.replace(self._file)
        except OSError as error:  # a file system that stumbles is no reason to end a run
            _LOG.warning("%s cannot be written: %s", self._file, error.strerror)
        faulthandler.dump_traceback_later(self._limit, repeat=True, file=self._stream)

    def _watch(self) -> None:
        """Every now and then: is anybody overdue? Said once for each phase of each rank."""
        said: set[tuple[int, float]] = set()
        while not self._over.wait(min(10.0, self._limit / 4)):
            beats = read_beats(self._folder)
            late = [beat for beat in beats if beat.overdue > 0 and (beat.rank, beat.since) not in said]
            if not late:
                continue
            said |= {(beat.rank, beat.since) for beat in late}
            behind = culprits(beats)
            _LOG.error(
                "no progress for %.0f s; behind the others: %s. Stacks: %s",
                max(time.time() - beat.since for beat in late),
                "; ".join(f"rank {b.rank} on {b.host} (pid {b.pid}) in {b.phase} of step {b.step}" for b in behind),
                self._stacks.parent,
            )
            dump_children(self._stacks.parent)


def culprits(beats: list[Beat]) -> list[Beat]:
    """The ranks that are furthest behind: of the lowest step, those in the phase that was entered first."""
    if not beats:
        return []
    step = min(beat.step for beat in beats)
    behind = [beat for beat in beats if beat.step == step]
    # Within a step whoever entered its phase earliest while others have moved on is the one they wait for.
    phases = {beat.phase for beat in behind}
    if len(phases) > 1:
        oldest = min(behind, key=lambda beat: beat.since)
        behind = [beat for beat in behind if beat.phase == oldest.phase]
    return behind


def read_beats(folder: Path) -> list[Beat]:
    """Of every rank of a run whose file is there and whole, by rank."""
    beats = []
    for file in sorted((folder / FOLDER).glob("rank-*.json")):
        try:
            raw: dict[str, Any] = json.loads(file.read_text())
            beats.append(Beat(**raw))
        except (OSError, ValueError, TypeError):
            continue  # the rank has just ended, or its file cannot be read at the moment
    return beats


def dump_children(folder: Path) -> None:
    """The stacks of this process's descendants (Ray's workers, an engine's core) by py-spy, which Ray brings along."""
    spy = shutil.which("py-spy", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if spy is None:
        return
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, subprocess.TimeoutExpired, OSError):
            name = " ".join(child.cmdline()[:3])
            if "python" not in child.name().lower() and "ray::" not in name and "VLLM" not in name:
                continue
            done = subprocess.run(
                [spy, "dump", "--nonblocking", "--pid", str(child.pid)], capture_output=True, text=True, timeout=20
            )
            if done.stdout:
                (folder / f"child-{child.pid}.txt").write_text(redact(f"{name}\n{done.stdout}"))


def main(arguments: Sequence[str]) -> int:
    """Exit status 1 where a run under FOLDER (a run's folder, or one that holds runs) has a rank without progress. Only
    living ranks of this host count, so that one hung node does not restart all, nor what a killed run left."""
    if len(arguments) != 1:
        print("usage: python -m megatron_dppo.launch.heartbeat FOLDER", file=sys.stderr)
        return 2
    root = Path(arguments[0])
    runs = [root, *(path for path in root.glob("*") if path.is_dir())]
    hung = [
        (run, beat)
        for run in runs
        if (run / FOLDER).is_dir()
        for beat in read_beats(run)
        if beat.host == socket.gethostname() and beat.overdue > 0 and beat.alive
    ]
    for run, beat in hung:
        where = f"rank {beat.rank} (pid {beat.pid}) in {beat.phase} of step {beat.step}"
        print(f"{run}: {where}, {beat.overdue:.0f} s overdue")
    return 1 if hung else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
