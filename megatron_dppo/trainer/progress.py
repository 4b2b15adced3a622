"""What a person watches while a run goes on: one line per step, and what is happening now."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from megatron_dppo.launch.console import terminal
from megatron_dppo.launch.secrets import redact

HEADER_EVERY = 20
SILENT_S = 30.0
"""A log is never silent for longer."""
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
    """Shows a run from its start to step `total_steps`. A context manager; used by one process of a run, in any of its
    threads.

    On a terminal: a table that grows by a row per step, above a bar with the current phase and the time left. Elsewhere
    (logs of a continuous integration, files): plain single lines, `step=7/40 reward=0.412 ... left=2:10`, and where
    nothing was printed for `SILENT_S` the phase, `step 7: rollout, answers: 34 of 256, 0:41`.
    Time left is the mean wall time of the last steps, evaluations included, times the steps to go.
    """

    def __init__(
        self, *, total_steps: int, title: str = "", console: Console | None = None, look_every_s: float = 1.0
    ) -> None:
        """`look_every_s`: seconds between two looks at what happens; 0 leaves looking (`look`) to the caller."""
        self.total_steps = total_steps
        self.console = console or terminal()
        self.detail: Callable[[], str] = str
        """Asked for more about the current phase, on a thread of its own; an error of it is no more."""
        self._live = self.console.is_terminal and not self.console.is_dumb_terminal
        self._rows = 0
        self._last = self._printed = self._since = time.monotonic()
        self._phase = ""
        self._durations: deque[float] = deque(maxlen=_STEPS_AVERAGED)
        self._look_every, self._over = look_every_s, threading.Event()
        self._looking = threading.Thread(target=self._look_on, daemon=True, name="progress")
        self._bar = RichProgress(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[phase]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]} left"),
            console=self.console,
            expand=True,
            disable=not self._live,
        )
        self._task = self._bar.add_task(title, total=total_steps, phase="", left="?")

    def phase(self, name: str) -> None:
        """Say what the run does now ("starting engines", "step 7: rollout"). The first phase is printed at once."""
        first, self._phase, self._since = not self._phase, name, time.monotonic()
        self._bar.update(self._task, phase=name)
        if first and not self._live:
            self._print(redact(name))

    def look(self) -> None:
        """Show the current phase: how long it has taken, and its detail."""
        try:
            detail = self.detail()
        except Exception:  # whoever is asked has ended, for a reason that others tell
            detail = ""
        now = time.monotonic()
        shown = ", ".join(part for part in (self._phase, detail) if part)
        self._bar.update(self._task, phase=shown)
        if not self._live and self._phase and now - self._printed >= SILENT_S:
            self._print(redact(f"{shown}, {clock(now - self._since)}"))

    def begin(self, first_step: int) -> None:
        """Steps begin, `first_step` of them done already: the time left counts from here."""
        self._last = time.monotonic()
        self._bar.update(self._task, completed=first_step)

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

    def _look_on(self) -> None:
        while not self._over.wait(self._look_every):
            self.look()

    def _print(self, text: str, style: str | None = None) -> None:
        self._printed = time.monotonic()
        self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Progress:
        self._last = self._printed = time.monotonic()
        self._bar.start()
        if self._look_every:
            self._looking.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._look_every:
            self._looking.join(timeout=10)  # it may wait for an answer that does not come
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
