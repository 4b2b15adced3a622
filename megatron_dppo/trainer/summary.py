"""The table at the end of a run: what it gained, what it took, and where everything is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_dppo.launch.console import terminal
from megatron_dppo.trainer.history import History
from megatron_dppo.trainer.progress import clock

_BEFORE_AND_AFTER = (
    ("held-out accuracy", "eval/accuracy", ".3f"),
    ("held-out answers well-formed", "eval/well_formed", ".3f"),
    ("training reward", "reward/mean", ".3f"),
    ("mean |pi - mu|", "policy/mean_abs_pi_mu", ".2e"),
    ("entropy (nats per token)", "policy/entropy", ".3f"),
    ("response length (tokens)", "response/length_mean", ".1f"),
)
_PHASES = ("rollout", "hand_over", "train", "sync", "eval")
_PARITY = (
    ("max |log pi - log mu| (nats)", "max_abs_logp_gap", ".1e"),
    ("mean |pi - mu|", "mean_abs_prob_gap", ".1e"),
    ("tokens routed differently", "differing_tokens", ",.0f"),
    ("routings compared (token x layer)", "compared_routings", ",.0f"),
)


@dataclass(frozen=True)
class Took:
    """Seconds of this process."""

    wall: float
    start: float
    """Of these, until the model was loaded, and the engines were up with its weights."""
    since: int = 1
    """Its first step: a run that was resumed has the rows of others before."""
    evaluated: bool = True
    """Whether it evaluated before that step."""


def summary_table(history: History, *, title: str, took: Took) -> Table:
    """First and last value of every metric that was logged, then steps, time and throughput. The parts of the time, as
    the steps' own `time/*_s` have them, add up to the whole: "other" is what is left for checkpoints, the parity check
    and the end."""
    table = Table(title=Text(title), title_justify="left")
    table.add_column("")
    for header in ("before", "after", "change"):
        table.add_column(header, justify="right")
    for label, name, spec in _BEFORE_AND_AFTER:
        values = history[name].values
        if len(values):
            change = f"{values[-1] - values[0]:+{spec}}" if len(values) > 1 else ""
            table.add_row(label, format(values[0], spec), format(values[-1], spec), change)
    table.add_section()
    table.add_row("steps", "", f"{_last_step(history)}", "")
    table.add_row("time (min:s)", "", clock(took.wall), "")
    parts = {"start": took.start}
    for phase in _PHASES:
        series = history[f"time/{phase}_s"]
        if len(series):
            since = took.since - 1 if phase == "eval" and took.evaluated else took.since
            parts[phase] = float(np.nansum(series.values[series.steps >= since]))
    for part, seconds in (parts | {"other": took.wall - sum(parts.values())}).items():
        table.add_row(f"  of it {part}", "", clock(seconds), "")
    throughput = history["throughput/tokens_per_second"].values
    if len(throughput):
        table.add_row("tokens/s (median step)", "", f"{np.nanmedian(throughput):,.0f}", "")
    return table


def parity_table(history: History) -> Table | None:
    """How far the trainer was from the engine on the first rollout, before any update, with the engine's routes
    replayed and with the live routers; None where the run did not check."""
    table = Table(title="Trainer against engine, first rollout, same weights", title_justify="left")
    table.add_column("")
    for header in ("routes replayed", "live routers"):
        table.add_column(header, justify="right")
    for label, name, spec in _PARITY:
        cells = [history[f"{prefix}/{name}"].values for prefix in ("parity", "parity_without_replay")]
        if any(len(cell) for cell in cells):
            table.add_row(label, *(format(cell[0], spec) if len(cell) else "" for cell in cells))
    return table if table.row_count else None


def print_summary(
    history: History, *, title: str, took: Took, paths: Mapping[str, Path], console: Console | None = None
) -> None:
    """The tables, then one line per path (label -> path), not wrapped, so that a path can be copied."""
    console = console or terminal()
    parity = parity_table(history)
    if parity is not None:
        console.print(parity)
    console.print(summary_table(history, title=title, took=took))
    width = max((len(label) for label in paths), default=0)
    for label, path in paths.items():
        console.print(f"{label:<{width}}  {path}", markup=False, highlight=False, soft_wrap=True)


def _last_step(history: History) -> int:
    return max((int(series.steps[-1]) for series in history.series.values() if len(series)), default=0)
