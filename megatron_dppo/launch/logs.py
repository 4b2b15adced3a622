"""Logs that a machine can read: one JSON object a line, with rank and host, without secrets."""

from __future__ import annotations

import json
import logging
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from megatron_dppo.errors import file_errors
from megatron_dppo.launch.secrets import redact

FOLDER = "logs"
"""Of the run's folder."""


class JsonLines(logging.Formatter):
    """`{"time": ..., "level": ..., "rank": ..., "host": ..., "logger": ..., "message": ..., "exception": ...}`"""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank, self._host = rank, socket.gethostname()

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "rank": self._rank,
            "host": self._host,
            "logger": record.name,
            "message": redact(record.getMessage()),
        }
        if record.exc_info:
            entry["exception"] = redact(self.formatException(record.exc_info))
        return json.dumps(entry, ensure_ascii=False)


class _Plain(logging.Formatter):
    """The message alone, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


class _File(logging.FileHandler):
    """One line says of a disk that is full; the run has more to say of that."""

    _failed = False

    def handleError(self, record: logging.LogRecord) -> None:  # logging's name
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._failed:
            self._failed = True
            print(f"{self.baseFilename} cannot be written: {error.strerror or error}", file=sys.stderr)

    def close(self) -> None:
        with suppress(OSError):  # what it could not write, once more
            super().close()


@contextmanager
def logging_to(folder: Path, rank: int) -> Iterator[Path]:
    """Inside, what this process logs (INFO and above, Python's warnings too) goes to `folder`/logs/rank-00000.jsonl.

    Warnings reach the terminal as well, where nobody has set handlers of his own; those stay as they are. Lines of an
    earlier start of the same run stay: the file is appended to.
    """
    file = folder / FOLDER / f"rank-{rank:05d}.jsonl"
    with file_errors(f"{file} cannot be written", "choose another run.dir"):
        file.parent.mkdir(parents=True, exist_ok=True)
        handler = _File(file, encoding="utf-8")
    handler.setFormatter(JsonLines(rank))
    handler.setLevel(logging.INFO)
    root, own = logging.getLogger(), logging.getLogger("megatron_dppo")
    handlers: list[logging.Handler] = [handler]
    if not root.handlers:  # with a handler at the root, logging no longer prints warnings of itself
        terminal = logging.StreamHandler()
        terminal.setFormatter(_Plain())
        terminal.setLevel(logging.WARNING)
        handlers.append(terminal)
    level = own.level
    own.setLevel(logging.INFO)
    for each in handlers:
        root.addHandler(each)
    try:
        yield file
    finally:
        for each in handlers:
            root.removeHandler(each)
        own.setLevel(level)
        handler.close()
