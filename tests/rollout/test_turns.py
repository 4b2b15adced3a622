"""Buffers that two processes use in turns, here of one byte."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from megatron_dppo.rollout.weight_transfer.turns import Emptying, Filling, TurnsBroken

TURNS, BUFFERS = 200, 2


def buffers_in(file: Path) -> np.memmap:
    return np.memmap(file, dtype=np.uint8, mode="r+" if file.exists() else "w+", shape=BUFFERS)


def empty(pipe: Connection, path: str, memory: Path, turns: int) -> None:
    """Take `turns` turns, say what was in the buffers or what broke, and stay."""
    shared, end, seen = buffers_in(memory), Emptying(path, timeout_s=60.0), []
    pipe.send("here")
    try:
        for number in range(turns):
            end.begin(number)
            seen.append(int(shared[number % BUFFERS]))
            end.end(number)
        pipe.send(seen)
    except TurnsBroken as error:
        pipe.send(str(error))
    pipe.recv()
    end.close()


@contextmanager
def emptied(filling: Filling, turns: int, folder: Path) -> Iterator[tuple[Connection, int, np.memmap]]:
    """Another process at the other end: its pipe, its number, and the buffers."""
    file = folder / "buffers"
    memory = buffers_in(file)
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    process = context.Process(target=empty, args=(its, filling.path, file, turns))
    process.start()
    its.close()
    try:
        assert mine.recv() == "here"
        yield mine, process.pid or 0, memory
    finally:
        if process.is_alive():
            mine.send("end")
        process.join(300)


def test_what_is_filled_is_emptied_once_and_in_order(tmp_path: Path) -> None:
    filling = Filling(BUFFERS, timeout_s=60.0)
    assert not filling.attended
    with emptied(filling, TURNS, tmp_path) as (pipe, _, memory):
        assert filling.attended
        for number in range(TURNS):
            filling.begin(number)
            memory[number % BUFFERS] = number
            filling.end(number)
        assert pipe.recv() == list(range(TURNS))
    assert not filling.attended
    filling.close()


def test_whoever_fills_does_not_wait_for_one_that_is_gone(tmp_path: Path) -> None:
    filling = Filling(BUFFERS, timeout_s=600.0)
    with emptied(filling, 1, tmp_path) as (pipe, process, _):
        for number in range(BUFFERS):
            filling.begin(number)
            filling.end(number)
        assert pipe.recv() == [0]
        filling.begin(BUFFERS)
        os.kill(process, signal.SIGKILL)
        with pytest.raises(TurnsBroken, match="the worker that reads the buffers is gone"):
            filling.begin(BUFFERS + 1)


def test_whoever_empties_hears_that_no_more_will_come(tmp_path: Path) -> None:
    filling = Filling(BUFFERS, timeout_s=600.0)
    with emptied(filling, TURNS, tmp_path) as (pipe, _, _):
        filling.begin(0)
        filling.end(0)
        filling.give_up()
        assert pipe.recv() == "the rank that fills the buffers gave up"


def test_who_is_late_is_not_waited_for(tmp_path: Path) -> None:
    filling = Filling(BUFFERS, timeout_s=0.2)
    with emptied(filling, 0, tmp_path):
        for number in range(BUFFERS):
            filling.begin(number)
        with pytest.raises(TurnsBroken, match=r"nothing came within 0.2 s"):
            filling.begin(BUFFERS)
