"""The metrics of a run as they lie on disk: one JSON object per line, read back as series."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dppo.errors import UserError

METRICS_FILE, SAMPLES_FILE, MASKED_TOKENS_FILE = "metrics.jsonl", "samples.jsonl", "masked_tokens.jsonl"
CONFIG_FILE = "config.yaml"
"""The settings that the run was started with."""
CHECKPOINTS = "checkpoints"
"""Folder of a run's training states."""
MODEL_FOLDER, ADAPTER_FOLDER = "hf", "adapter"
"""Where, in the run's folder, the trained model is written (adapters merged), and the adapter alone."""


@dataclass(frozen=True)
class Series:
    """One metric over the run: `steps` int64 `[n]` rising (or `History.by_time`), `values` float64 `[n]` (NaN where it
    was not finite)."""

    steps: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.steps)


class History:
    """Every metric of a run by name. A metric that was never logged is an empty series."""

    def __init__(self, series: dict[str, Series]) -> None:
        self.series = series

    def __getitem__(self, name: str) -> Series:
        return self.series.get(name, Series(np.zeros(0, dtype=np.int64), np.zeros(0)))

    def by_time(self) -> History:
        """Every series over the minutes that its steps took until then (`time/step_s`: without evaluation and saving).
        Steps that were not timed take none."""
        timed = self["time/step_s"]
        minutes = np.concatenate([[0.0], np.cumsum(np.nan_to_num(timed.values)) / 60])
        places = {name: minutes[np.searchsorted(timed.steps, one.steps, "right")] for name, one in self.series.items()}
        return History({name: Series(places[name], one.values) for name, one in self.series.items()})

    @staticmethod
    def read(path: Path) -> History:
        """From a metrics file or the folder of a run. Where a step was logged twice, the later value counts.

        Errors: `UserError` where there is no such file, it holds no rows, or a row is not what `Tracker` writes.
        """
        file = path / METRICS_FILE if path.is_dir() else path
        if not file.is_file():
            raise UserError(f"{file}: no such file; give a metrics file or the folder of a run that has one")
        values: dict[str, dict[int, float]] = defaultdict(dict)
        for row in read_rows(file):
            for name, value in row.items():
                if name != "step":
                    values[name][row["step"]] = _number(value, f"{file}: {name} of step {row['step']}")
        if not values:
            raise UserError(f"{file}: holds no metrics yet; wait for the first step of the run")
        series = {}
        for name, by_step in values.items():
            steps = sorted(by_step)
            series[name] = Series(np.array(steps, dtype=np.int64), np.array([by_step[step] for step in steps]))
        return History(series)


def _number(value: Any, where: str) -> float:
    try:
        number = np.nan if value is None else float(value)
        return number if np.isfinite(number) else np.nan
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"{where} is {value!r:.60}, which is no number; correct it") from None


@contextmanager
def as_written(file: Path) -> Iterator[None]:
    """Around what takes fields out of rows: `UserError` for a row that no run wrote."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{file}: holds a row that no run writes ({reason:.200}); take it out") from error


def read_rows(file: Path) -> Iterator[dict[str, Any]]:
    """The complete rows of a metrics file, without what a crash cut off at its end."""
    return (row for _, row in read_lines(file))


def read_lines(file: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The complete lines of a metrics file with the row in each."""
    for number, line in complete_lines(file):
        try:
            row = json.loads(line)
            row["step"] = int(np.int64(row["step"]))  # as series hold it
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise UserError(f'{file}, line {number}: not a metrics row ({{"step": ..., ...}}): {error}') from error
        yield line, row


def complete_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that is written line by line, with their numbers from 1.

    A last line without its newline was cut off by a crash. Zeros are what a power cut leaves of blocks that were not on
    the disk yet, at the end of a file. Neither is a line.
    """
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n") or b"\0" in line:
                return
            yield number, line
