"""Ctrl-C and termination end a rank even while it waits inside a collective."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

GRACE_SECONDS = 8.0
"""How long a rank may take to leave what it does before it is ended; torchrun allows 30."""


class Interrupted(BaseException):
    """SIGINT or SIGTERM arrived. Not an `Exception`, so that no handler of ordinary errors swallows it."""

    def __init__(self, number: int) -> None:
        self.exit_code = 128 + number
        super().__init__(f"stopped by {signal.Signals(number).name}")


@contextlib.contextmanager
def interruptible(clean_up: Callable[[], None]) -> Iterator[None]:
    """Inside, SIGINT and SIGTERM raise `Interrupted` in the main thread.

    Python runs signal handlers between bytecodes only, and a rank that waits for others sits in C++. A thread that is
    woken by the signal itself therefore runs `clean_up` (stop child processes) and ends the process after
    `GRACE_SECONDS`, unless the main thread got out on its own.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    done = threading.Event()

    def watch() -> None:
        while number := os.read(reader, 1):
            if number[0] not in (signal.SIGINT, signal.SIGTERM):
                continue
            if not done.wait(GRACE_SECONDS):
                with contextlib.suppress(Exception):
                    clean_up()
                print(
                    f"rank {os.environ.get('RANK', '0')}: stopped by {signal.Signals(number[0]).name}", file=sys.stderr
                )
                os._exit(128 + number[0])
            return

    def handler(number: int, _frame: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Interrupted(number)

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    previous_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=watch, daemon=True, name="signal-watch").start()
    try:
        yield
    finally:
        done.set()
        signal.set_wakeup_fd(previous_fd)
        for number, old in before.items():
            signal.signal(number, old)
        os.close(writer)
