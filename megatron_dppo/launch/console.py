"""Standard output when its reader has gone, or its disk is full: it ends a command, and no run."""

from __future__ import annotations

import logging
import os
import sys
from typing import IO, Any, cast

from rich.console import Console

_LOG = logging.getLogger(__name__)


class CommandConsole(Console):
    """Standard output for commands that end where nobody reads it: `exit_status` says so, which rich's own way, to
    exit with status 1 and no word, would not reach."""

    def on_broken_pipe(self) -> None:
        """Called while the `BrokenPipeError` is handled: raise it on."""
        raise


def terminal() -> Console:
    """What work of hours shows itself on. The rest of what cannot be written goes nowhere, which is logged."""
    return Console(file=None if sys.stdout is None else cast("IO[str]", _Output(sys.stdout)), highlight=False)


class _Output:
    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())  # so that what is buffered fails no later flush
        os.close(nowhere)
        _LOG.warning("standard output cannot be written any more, the work goes on without: %s", error.strerror)
