"""Metrics reach both sinks, survive a crash, and a resumed run continues them without a seam."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from megatron_dppo.config.trainer import TrackingConfig
from megatron_dppo.errors import UserError
from megatron_dppo.trainer.history import History, read_rows
from megatron_dppo.trainer.samples import Sample
from megatron_dppo.trainer.sinks import open_sinks
from megatron_dppo.trainer.tracking import Tracker, require_unused


def log_steps(tracker: Tracker, steps: range, value: float) -> None:
    for step in steps:
        tracker.log(step, {"reward/mean": value * step, "time/step_s": 1.0})


def scalars(folder: Path, name: str) -> dict[int, float]:
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {event.step: event.value for event in events.Scalars(name)}


def next_second() -> None:
    """TensorBoard reads files in the order of their names: those of one process and second end in `.9` and `.10`."""
    time.sleep(1.01 - time.time() % 1)


def test_what_is_logged_comes_back(tmp_path: Path) -> None:
    with closing(Tracker(tmp_path)) as tracker:
        tracker.log(0, {"eval/accuracy": 0.25})
        log_steps(tracker, range(1, 4), 0.5)
        tracker.log(3, {"eval/accuracy": np.float32(0.5)})
    history = History.read(tmp_path)
    assert history["reward/mean"].steps.tolist() == [1, 2, 3]
    assert history["reward/mean"].values.tolist() == [0.5, 1.0, 1.5]
    assert history["eval/accuracy"].steps.tolist() == [0, 3]
    assert len(history["never/logged"]) == 0
    assert scalars(tmp_path, "reward/mean") == {1: 0.5, 2: 1.0, 3: 1.5}


def test_a_row_is_on_disk_before_log_returns(tmp_path: Path) -> None:
    with closing(Tracker(tmp_path)) as tracker:
        tracker.log(1, {"reward/mean": 0.5})
        assert json.loads(tracker.path.read_text()) == {"step": 1, "reward/mean": 0.5}


def test_values_that_are_not_finite_stay_valid_json(tmp_path: Path) -> None:
    with closing(Tracker(tmp_path)) as tracker:
        tracker.log(1, {"optimizer/grad_norm": math.inf, "optimizer/loss": math.nan})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    json.loads(tracker.path.read_text(), parse_constant=refuse)
    assert np.isnan(History.read(tmp_path)["optimizer/loss"].values).all()


def test_resume_removes_later_steps_and_a_torn_line(tmp_path: Path) -> None:
    with closing(Tracker(tmp_path)) as tracker:
        log_steps(tracker, range(1, 7), 1.0)
    with open(tracker.path, "a") as file:
        file.write('{"step": 7, "rew')  # as a crash in mid-write leaves it
    next_second()
    with closing(Tracker(tmp_path, resume_step=4)) as tracker:
        log_steps(tracker, range(5, 8), 10.0)
    expected = [1, 2, 3, 4, 50, 60, 70]
    assert History.read(tmp_path)["reward/mean"].values.tolist() == expected
    assert scalars(tmp_path, "reward/mean") == dict(enumerate(expected, start=1))


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "masked_tokens.jsonl"])
@pytest.mark.parametrize("tail", [b'{"step": 3, "a', b"\0" * 5000, b"\0" * 4096 + b'": 1}\n{"step": 3, "a": 1}\n'])
def test_a_power_cut_costs_no_whole_line_and_is_told(
    tmp_path: Path, name: str, tail: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Blocks that were not on the disk yet come back as zeros."""
    whole = '{"step": 1, "a": 1}\n{"step": 2, "a": "é"}\n'.encode()
    (tmp_path / name).write_bytes(whole + tail)
    Tracker(tmp_path, resume_step=2).close()
    assert (tmp_path / name).read_bytes() == whole
    assert f"{name}: its last {len(tail)} bytes are no whole line" in caplog.text


def test_what_is_logged_is_flushed_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        real(descriptor)
        flushed.append((os.readlink(f"/proc/self/fd/{descriptor}"), os.fstat(descriptor).st_size))

    monkeypatch.setattr(os, "fsync", fsync)
    with closing(Tracker(tmp_path)) as tracker:
        for name, write in (
            ("metrics.jsonl", lambda: tracker.log(1, {"a": 1.0})),
            ("samples.jsonl", lambda: tracker.samples(1, [sample("fine")])),
            ("masked_tokens.jsonl", lambda: tracker.masked_tokens(1, {"positive": [("a", 1)]})),
        ):
            write()
            assert (str(tmp_path / name), (tmp_path / name).stat().st_size) in flushed
            assert any(path == str(tmp_path) for path, _ in flushed)


def sample(text: str) -> Sample:
    return Sample(
        prompt=text, response=text, reference=text, reward=0.0, parts={}, correct=False, tokens=1, finish_reason="stop",
        advantage=0.0, pieces=list(text), sequence=0, episode=0, prompt_tokens=1,
    )  # fmt: skip


class Table:
    """A service that takes text as UTF-8."""

    rows: ClassVar[list[list[object]]] = []

    def log(self, step: int, values: Mapping[str, float | None]) -> None: ...

    def table(self, step: int, name: str, columns: list[str], rows: list[list[object]]) -> None:
        "".join(cell for row in rows for cell in row if isinstance(cell, str)).encode()
        self.rows.extend(rows)

    def close(self) -> None: ...


def test_half_of_a_surrogate_pair_breaks_no_sink(tmp_path: Path) -> None:
    broken = "smile \ud83d and é"
    with closing(Tracker(tmp_path, sinks=[Table()])) as tracker:
        tracker.samples(1, [sample(broken)])
        tracker.masked_tokens(1, {"positive": [(broken, 3)]})
    assert json.loads((tmp_path / "samples.jsonl").read_text())["reference"] == broken
    assert json.loads((tmp_path / "masked_tokens.jsonl").read_text())["positive"] == [[broken, 3]]
    assert Table.rows[0][1] == "smile \\ud83d and é"


class Gone:
    """A service that cannot be reached until its third row."""

    def __init__(self) -> None:
        self.asked, self.taken = 0, []

    def log(self, step: int, values: object) -> None:
        self.asked += 1
        if self.asked < 3:
            raise ConnectionError("no route to it")
        self.taken.append(step)

    def table(self, *table: object) -> None:
        raise ConnectionError("no route to it")

    def close(self) -> None:
        raise ConnectionError("no route to it")


def test_those_who_watch_end_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*scalar: object, **where: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SummaryWriter, "add_scalar", full)
    gone = Gone()
    with closing(Tracker(tmp_path, sinks=[gone])) as tracker:
        for step in (1, 2, 3):
            tracker.log(step, {"x": 0.5})
        tracker.samples(3, [])
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert gone.taken == [3]
    assert [record.getMessage() for record in caplog.records] == [
        "SummaryWriter failed, the run goes on without: OSError: [Errno 28] No space left on device",
        "Gone failed, the run goes on without: ConnectionError: no route to it",
    ]


@pytest.fixture
def fresh_wandb() -> Iterator[None]:
    """It reads the environment once a process."""
    wandb.teardown()
    yield
    wandb.teardown()


@pytest.mark.usefixtures("fresh_wandb")
def test_a_service_without_a_key_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"tracking.wandb=true, but wandb cannot be opened: UsageError: .*key"):
        open_sinks(TrackingConfig(wandb=True), run="r", folder=tmp_path, settings={}, resume=False)


@pytest.mark.usefixtures("fresh_wandb")
def test_metrics_that_cannot_be_written_are_refused_before_a_step(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/proc/self/task")  # root may write any file, but not a directory
    with pytest.raises(UserError, match="cannot write metrics there: Is a directory"):
        Tracker(tmp_path)


def test_a_second_service_that_cannot_be_opened_closes_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setitem(sys.modules, "trackio", None)  # as where it is not installed
    both = TrackingConfig(wandb=True, trackio=True)
    with pytest.raises(UserError, match=r"^tracking.trackio=true, but trackio cannot be opened") as error:
        open_sinks(both, run="r", folder=tmp_path, settings={}, resume=False)
    assert "WANDB_MODE" not in str(error.value)
    assert list((tmp_path / "wandb").glob("offline-run-*"))
    assert wandb.run is None


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path: Path) -> None:
    with closing(Tracker(tmp_path)) as tracker:
        log_steps(tracker, range(1, 3), 1.0)
    before = tracker.path.read_bytes()
    with pytest.raises(UserError, match=r"already holds the metrics.*trainer\.resume=true"):
        Tracker(tmp_path)
    assert tracker.path.read_bytes() == before


def test_an_unwritable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"run\.dir=.*file/run: cannot write"):
        Tracker(tmp_path / "file" / "run")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs the device that is always full")
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    tracker = Tracker(tmp_path)
    with pytest.raises(UserError, match=r"metrics\.jsonl: cannot write: No space left"):
        tracker.log(1, {"reward/mean": 1.0})


def test_step_is_not_a_metric(tmp_path: Path) -> None:
    with closing(Tracker(tmp_path)) as tracker, pytest.raises(ValueError, match="not a metric"):
        tracker.log(1, {"step": 2.0})


def test_reading_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        History.read(tmp_path)
    file = tmp_path / "metrics.jsonl"
    file.write_text("")
    with pytest.raises(UserError, match="holds no metrics yet"):
        History.read(file)
    file.write_text('{"step": 1, "a": 1.0}\nnonsense\n')
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\xff\n")
    with pytest.raises(UserError, match=r"picture\.png, line 1: not a metrics row"):
        History.read(tmp_path / "picture.png")
    with pytest.raises(UserError, match="line 2: not a metrics row"):
        History.read(file)
    for value in ('"high"', "[1]", "1" + "0" * 400):
        file.write_text(f'{{"step": 1, "a": {value}}}\n')
        with pytest.raises(UserError, match=r"a of step 1 is .*which is no number"):
            History.read(file)
    file.write_text('{"step": 1, "a": Infinity}\n')  # another program's: a run writes null
    assert np.isnan(History.read(file)["a"].values).all()
    for row in ('{"step": 1e999}', '{"step": []}', f'{{"step": {2**63}}}', "[" * 100_000):
        file.write_text(row + "\n")
        with pytest.raises(UserError, match="line 1: not a metrics row"):
            History.read(file)


@pytest.mark.parametrize("name", ["hf", "adapter", "checkpoints"])
def test_what_the_end_of_a_run_would_stumble_over_is_refused_at_its_start(tmp_path: Path, name: str) -> None:
    (tmp_path / name / ".step_8.incomplete-0a1b2c3d").mkdir(parents=True)  # its save was killed
    require_unused(tmp_path)
    (tmp_path / name / "config.json").write_text("{}")
    with pytest.raises(UserError, match=rf"run\.dir=.* holds {name}/ of another run"):
        require_unused(tmp_path)
