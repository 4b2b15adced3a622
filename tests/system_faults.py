"""Calls that fail as the system's do."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest


def failing(number: int) -> Callable[..., NoReturn]:
    """In place of a call that takes anything: raises the OSError of that `errno`."""

    def fails(*_: object, **__: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return fails


def fail_to_open(monkeypatch: pytest.MonkeyPatch, part: str, number: int) -> None:
    """`Path.open` of a file with `part` in its name raises the OSError of that `errno`."""
    opened = Path.open

    def fails(self: Path, *words: Any, **options: Any) -> Any:
        return (failing(number) if part in self.name else opened)(self, *words, **options)

    monkeypatch.setattr(Path, "open", fails)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Inside, no file of this process grows beyond `size` bytes, as on a disk that is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
