"""Calls that fail as the system's do."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NoReturn


def failing(number: int) -> Callable[..., NoReturn]:
    """In place of a call that takes anything: raises the OSError of that `errno`."""

    def fails(*_: object, **__: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return fails
