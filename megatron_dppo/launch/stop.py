"""Stopping a run at the end of a step, with its state saved: asked for by a signal or by a file."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

REQUEST, DONE = "stop", "stopped"
"""Files of the run's folder: the first asks (`touch RUN/stop`, on any cluster), the second says it is done."""
TERM_GRACE_SECONDS = 25.0
"""From SIGTERM until the run is broken off: torchrun kills its ranks 30 s after it passed the signal on."""


class StopRequest:
    """Whether somebody asked this run to end. SIGUSR1 and the file wait for the step however long it takes; SIGTERM
    waits for `TERM_GRACE_SECONDS` and then raises KeyboardInterrupt, as SIGINT does at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._signalled: str = ""

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Signals are taken inside; what stood there before is put back. An earlier run's answer goes; a request
        that is there already counts."""
        with suppress(FileNotFoundError):
            (self._folder / DONE).unlink()
        if threading.current_thread() is not threading.main_thread():
            yield self
            return

        limited = False

        def note(number: int, frame: FrameType | None) -> None:
            nonlocal limited
            if number == signal.SIGTERM and not limited:  # once: closing down is not cut short by another
                limited = True
                signal.setitimer(signal.ITIMER_REAL, TERM_GRACE_SECONDS)
            self._signalled = self._signalled or signal.Signals(number).name

        def out_of_time(number: int, frame: FrameType | None) -> None:
            raise KeyboardInterrupt(signal.SIGTERM)

        handlers = {signal.SIGTERM: note, signal.SIGUSR1: note, signal.SIGALRM: out_of_time}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield self
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def reason(self) -> str:
        """What asked; empty where nothing did."""
        if self._signalled:
            return self._signalled
        return f"the file {self._folder / REQUEST}" if (self._folder / REQUEST).exists() else ""

    def done(self, step: int) -> None:
        """Say that the state after `step` is saved. For one rank."""
        with suppress(FileNotFoundError):
            (self._folder / REQUEST).unlink()
        (self._folder / DONE).write_text(f"step {step}\n")
