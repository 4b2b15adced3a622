"""What is shown while a run goes on, on a terminal and in a log."""

from __future__ import annotations

import io
import os
import re
import sys
import threading

import pytest
from rich.console import Console

from megatron_dppo.trainer import progress
from megatron_dppo.trainer.progress import Progress, clock

METRICS = {
    "reward/mean": 0.41234,
    "reward/accuracy": 0.4,
    "policy/mean_abs_pi_mu": 0.00123,
    "policy/entropy": 0.8,
    "policy/masked_fraction": 0.0123,
    "throughput/tokens_per_second": 2310.4,
    "optimizer/loss": 7.0,
}


class Clock:
    """Stands in for `time.monotonic`: the steps of the test take exactly as long as it says."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Clock:
    wall = Clock()
    monkeypatch.setattr(progress.time, "monotonic", wall.monotonic)
    return wall


def show(console: Console, wall: Clock, steps: int = 2) -> str:
    with Progress(total_steps=10, title="tiny", console=console, look_every_s=0) as shown:
        for step in range(1, steps + 1):
            shown.phase("training")
            wall.now += 30.0
            shown.look()
            shown.step(step, METRICS)
        shown.note("held-out accuracy 0.500")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_log_gets_one_plain_line_per_step(wall: Clock) -> None:
    text = show(Console(file=io.StringIO(), width=40), wall)
    shown = "reward=0.412 accuracy=0.400 mean|pi-mu|=1.23e-03 entropy=0.800 masked=1.23% tokens/s=2,310"
    assert text.splitlines() == [
        "training",
        "training, 0:30",
        f"step=1/10 {shown} left=4:30",
        "training, 0:30",
        f"step=2/10 {shown} left=4:00",
        "held-out accuracy 0.500",
    ]


def test_a_terminal_gets_a_table_that_fits_and_a_bar(wall: Clock) -> None:
    text = show(Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None), wall, steps=21)
    text = re.sub(r"\x1b\[[0-9?]*[A-Za-z]", "", text)
    rows = [line for line in text.splitlines() if "/10 " in line and "0.412" in line]
    assert len(rows) == 21
    assert max(len(row) for row in rows) <= 80
    assert text.count("mean|pi-mu|") == 2  # the header comes again after 20 rows
    assert "training" in text
    assert "━" in text


def test_a_log_is_never_silent_for_more_than_half_a_minute_and_says_no_more_than_that(wall: Clock) -> None:
    console = Console(file=io.StringIO(), width=40)
    ready = 0
    with Progress(total_steps=2, console=console, look_every_s=0) as shown:
        shown.detail = lambda: f"{ready} of 2 engines ready" if ready < 2 else ""

        def wait(seconds: int) -> None:
            for _ in range(seconds):
                wall.now += 1.0
                shown.look()

        shown.phase("starting ranks")
        wait(20)
        shown.phase("starting engines")
        wait(20)
        ready = 1
        wait(30)
        shown.begin(0)
        ready = 2
        for step in (1, 2):
            shown.phase(f"step {step}: rollout")
            wait(29)
            shown.step(step, {})
    lines = [line for line in console.file.getvalue().splitlines() if "reward" not in line]
    assert lines == [
        "starting ranks",
        "starting engines, 0 of 2 engines ready, 0:10",
        "starting engines, 1 of 2 engines ready, 0:40",
        "step 1: rollout, 0:20",
    ]
    assert "left=0:29" in console.file.getvalue()  # the time left knows nothing of the start


def test_a_detail_that_cannot_be_had_is_left_out(wall: Clock) -> None:
    console = Console(file=io.StringIO(), width=80)
    with Progress(total_steps=1, console=console, look_every_s=0) as shown:
        shown.phase("starting engines")
        shown.detail = lambda: str(1 // 0)
        wall.now += 31.0
        shown.look()
    assert console.file.getvalue().splitlines() == ["starting engines", "starting engines, 0:31"]


def test_a_thread_of_its_own_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SILENT_S", 0.0)
    console, seen = Console(file=io.StringIO(), width=80), threading.Event()
    with Progress(total_steps=1, console=console, look_every_s=0.01) as shown:
        shown.phase("starting engines")
        shown.detail = lambda: seen.set() or "here"
        assert seen.wait(60)
    assert re.search(r"starting engines, here, \d:\d\d", console.file.getvalue())


def test_metrics_that_a_step_lacks_are_dashes(wall: Clock) -> None:
    console = Console(file=io.StringIO(), width=80)
    with Progress(total_steps=1, console=console) as shown:
        shown.step(1, {"reward/mean": 1.0})
    assert "reward=1.000 accuracy=- " in console.file.getvalue()


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (750, "12:30"), (11045, "3:04:05")])
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


@pytest.mark.parametrize("end", ["the reader has gone", "the disk of the log is full"])
def test_what_cannot_be_shown_ends_no_run(end: str, wall: Clock, monkeypatch: pytest.MonkeyPatch,
                                          caplog: pytest.LogCaptureFixture) -> None:  # fmt: skip
    """A killed `tee` cost a run all that came after its last state."""
    if end == "the reader has gone":
        reading, writing = os.pipe()
        os.close(reading)
    else:
        writing = os.open("/dev/full", os.O_WRONLY)
    with open(writing, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        shown = Progress(total_steps=10, title="tiny", look_every_s=0)
        with shown:
            shown.phase("training")
            for step in (1, 2):
                shown.step(step, METRICS)
        monkeypatch.undo()
    (warning,) = caplog.messages
    assert "cannot be written any more, the work goes on without: " in warning
