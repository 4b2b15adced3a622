"""How much of a GPU's memory each of several processes may take."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path


class GpuShare:
    """This process's part of `gib` GiB that all who open `file` divide: it locks as many of the file's bytes as it
    takes GiB. The system gives them back when the process ends, however it does. One object for each process."""

    def __init__(self, file: Path, gib: int) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(file, "ab")  # noqa: SIM115  # closing it would give everything back
        self._gib = gib
        self.held = 0

    def fits(self, gib: int) -> bool:
        """Whether it has just that."""
        return self.held == min(gib, self._gib)

    def take(self, gib: int, until: float) -> bool:
        """Give back what it has, then wait until `gib` GiB are free, but not beyond `until` of `time.monotonic`;
        whether it has them. Who asks for more than there is waits until it is alone."""
        while not self._try(min(gib, self._gib)):
            if time.monotonic() >= until:
                return False
            time.sleep(0.5)
        return True

    def _try(self, gib: int) -> bool:
        self._give_back()
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1)  # the first byte: one process looks for others at a time
        try:
            for place in range(1, self._gib + 1):
                if self.held < gib:
                    self.held += self._lock(place)
            if self.held < gib:
                self._give_back()
                return False
            return True
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1)

    def _give_back(self) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN, self._gib, 1)
        self.held = 0

    def _lock(self, place: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        except (BlockingIOError, PermissionError):
            return False
        return True
