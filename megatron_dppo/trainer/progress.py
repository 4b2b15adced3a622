"""What a person watches while a run goes on: one line per step, and on a terminal what is happening now."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from megatron_dppo.launch.secrets import redact

HEADER_EVERY = 20
_STEPS_AVERAGED = 20


@dataclass(frozen=True)
class Column:
    """A metric as it is shown: under `header` in the table of a terminal, as `header=value` in a log."""

    metric: str
    header: str
    spec: str

    def show(self, metrics: Mapping[str, float]) -> str:
        return format(metrics[self.metric], self.spec) if self.metric in metrics else "-"


COLUMNS = (
    Column("reward/mean", "reward", ".3f"),
    Column("reward/accuracy", "accuracy", ".3f"),
    Column("policy/mean_abs_pi_mu", "mean|pi-mu|", ".2e"),
    Column("policy/entropy", "entropy", ".3f"),
    Column("policy/masked_fraction", "masked", ".2%"),
    Column("throughput/tokens_per_second", "tokens/s", ",.0f"),
)


class Progress:
    """Shows steps `first_step + 1 ... total_steps`. A context manager; used by one process of a run.

    On a terminal: a table that grows by a row per step, above a bar with the current phase and the time left. Elsewhere
    (logs of a continuous integration, files): plain single lines, `step=7/40 reward=0.412 ... left=2:10`.
    Time left is the mean wall time of the last steps, evaluations included, times the steps to go.
    """

    def __init__(
        self, *, total_steps: int, first_step: int = 0, title: str = "", console: Console | None = None
    ) -> None:
        self.total_steps = total_steps
        self.console = console or Console(highlight=False)
        self._live = self.console.is_terminal and not self.console.is_dumb_terminal
        self._rows = 0
        self._last = time.monotonic()
        self._durations: deque[float] = deque(maxlen=_STEPS_AVERAGED)
        self._bar = RichProgress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[phase]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]} left"),
            console=self.console,
            expand=True,
            disable=not self._live,
        )
        self._task = self._bar.add_task(title, total=total_steps, completed=first_step, phase="", left="?")

    def phase(self, text: str) -> None:
        """Say what the run does now ("rollout", "training", "evaluation"); shown on a terminal only."""
        self._bar.update(self._task, phase=text)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step. Metrics that are not in `COLUMNS` are ignored; those missing are shown as `-`."""
        now = time.monotonic()
        self._durations.append(now - self._last)
        self._last = now
        left = clock(sum(self._durations) / len(self._durations) * (self.total_steps - step))
        self._bar.update(self._task, completed=step, left=left)
        cells = [column.show(metrics) for column in COLUMNS]
        if self._live:
            if self._rows % HEADER_EVERY == 0:
                self._print(_table_row("step", [column.header for column in COLUMNS], "left"), style="bold")
            self._rows += 1
            self._print(_table_row(f"{step}/{self.total_steps}", cells, left))
        else:
            shown = " ".join(f"{column.header}={cell}" for column, cell in zip(COLUMNS, cells, strict=True))
            self._print(f"step={step}/{self.total_steps} {shown} left={left}")

    def note(self, text: str) -> None:
        """A line of its own between the steps: an evaluation, a saved checkpoint."""
        self._print(redact(text))

    def _print(self, text: str, style: str | None = None) -> None:
        self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Progress:
        self._last = time.monotonic()
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


def clock(seconds: float) -> str:
    """`0:07`, `12:30`, `3:04:05`."""
    whole = round(seconds)
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def _table_row(step: str, cells: list[str], left: str) -> str:
    widths = [max(9, len(column.header)) for column in COLUMNS]
    shown = "".join(f" {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
    return f"{step:>9}{shown} {left:>8}"
