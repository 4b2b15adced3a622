"""Two processes of one machine that use buffers in turns, without a call for each: one fills, the other empties.

```
trainer rank   fill 0   fill 1   waits until 0 is empty, fill 2 ...
worker                  waits until 0 is full, empty 0, empty 1 ...
```
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np

_POLL_S = 0.00002
_LOOK_S = 0.05
"""How often who waits looks whether the other one is still there."""


class TurnsBroken(RuntimeError):
    """The other process gave up, ended, or was late."""


class _Counts:
    """A page that both processes see: how many were filled and emptied, and whether the filling one gave up."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, mmap.PAGESIZE)
        self._numbers = np.frombuffer(self._memory, dtype=np.int64, count=3)

    filled = property(lambda self: int(self._numbers[0]), lambda self, value: self._numbers.__setitem__(0, value))
    emptied = property(lambda self: int(self._numbers[1]), lambda self, value: self._numbers.__setitem__(1, value))
    given_up = property(lambda self: int(self._numbers[2]), lambda self, value: self._numbers.__setitem__(2, value))

    def close(self) -> None:
        del self._numbers
        with suppress(BufferError):
            self._memory.close()


def _wait(over: Callable[[], bool], broken: Callable[[], str], timeout_s: float) -> None:
    began = looked = time.monotonic()
    while not over():
        now = time.monotonic()
        if now - looked > _LOOK_S:
            looked = now
            if (why := broken()) and not over():
                raise TurnsBroken(why)
        if now - began > timeout_s:
            raise TurnsBroken(f"nothing came within {timeout_s:g} s")
        time.sleep(_POLL_S)


class Filling:
    """The end of the process that fills `buffers` buffers, one after another, again and again.

    The other end is there while it holds a lock on the file; a process that ends, however it ends, lets go of it.
    """

    def __init__(self, buffers: int, timeout_s: float) -> None:
        self._buffers, self._timeout = buffers, timeout_s
        self._descriptor = os.memfd_create("megatron-dppo-turns")
        os.ftruncate(self._descriptor, mmap.PAGESIZE)
        self._counts = _Counts(self._descriptor)
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        """Where the other process finds it."""

    @property
    def attended(self) -> bool:
        """Whether there is somebody at the other end."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return False

    def begin(self, number: int) -> None:
        """Wait until the buffer of turn `number` may be filled."""
        _wait(
            lambda: self._counts.emptied > number - self._buffers,
            lambda: "" if self.attended else "the worker that reads the buffers is gone",
            self._timeout,
        )

    def end(self, number: int) -> None:
        """The buffer of turn `number` is full."""
        self._counts.filled = number + 1

    def give_up(self) -> None:
        """No more will come."""
        self._counts.given_up = 1

    def close(self) -> None:
        self._counts.close()
        os.close(self._descriptor)


class Emptying:
    """The end of the process that empties the buffers."""

    def __init__(self, path: str, timeout_s: float) -> None:
        self._timeout = timeout_s
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._counts = _Counts(self._descriptor)

    def begin(self, number: int) -> None:
        """Wait until the buffer of turn `number` is full."""
        _wait(
            lambda: self._counts.filled > number,
            lambda: "the rank that fills the buffers gave up" if self._counts.given_up else "",
            self._timeout,
        )

    def end(self, number: int) -> None:
        """The buffer of turn `number` may be filled again."""
        self._counts.emptied = number + 1

    def close(self) -> None:
        """Be there no more. Idempotent."""
        if self._descriptor >= 0:
            self._counts.close()
            os.close(self._descriptor)
            self._descriptor = -1
