"""Calls that fail as the system's do."""

from __future__ import annotations

import os
from collections.abc import Callable
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
