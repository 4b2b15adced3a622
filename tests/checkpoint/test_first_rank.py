"""What rank 0 does alone fails all ranks alike."""

from __future__ import annotations

import errno
import os
import threading
import urllib.error
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import pytest

from megatron_dppo.checkpoint.first_rank import on_first_rank, write_on_first_rank
from megatron_dppo.errors import SystemFault, UserError
from tests.distributed import run_ranks


def fails(rank: int) -> list[str]:
    unsendable = OSError(errno.EIO, os.strerror(errno.EIO), "f")
    unsendable.lock = threading.Lock()  # type: ignore[attr-defined]
    said = []
    for error in (unsendable, urllib.error.HTTPError("u", 404, "gone", Message(), None), UserError("f: is cut off")):

        def call(error: Exception = error) -> None:
            raise error

        with pytest.raises((UserError, SystemFault)) as found:
            on_first_rank(call)
        said.append(f"{found.type.__name__}: {found.value}")
    return said


def test_an_error_that_cannot_be_sent_reaches_every_rank() -> None:
    said = [
        "SystemFault: [Errno 5] Input/output error: 'f'",
        "UserError: HTTP Error 404: gone",
        "UserError: f: is cut off",
    ]
    assert run_ranks(fails, 2) == [said, said]


def stops(rank: int, folder: str) -> tuple[str, list[int], list[int]]:
    def write(error: BaseException, stream: Iterator[int]) -> list[int]:
        def begin(_: Path) -> None:
            next(stream)
            raise error

        with pytest.raises(type(error)):
            write_on_first_rank(Path(folder) / "whole", stream, begin, overwrite=False)
        return list(stream)

    after_a_signal = write(KeyboardInterrupt(), iter(range(5)))
    return ", ".join(os.listdir(folder)), after_a_signal, write(UserError("f: is cut off"), iter(range(5)))


def test_a_signal_ends_a_folder_that_is_written_at_once_and_an_error_lets_the_others_send(tmp_path: Path) -> None:
    assert run_ranks(stops, 1, str(tmp_path)) == [("", [1, 2, 3, 4], [])]
