"""Tables and pictures of what `study.py` ran: OUT/study.md, and pictures beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from examples.stability_study.study import LABELS
from megatron_dppo.config.load import read_tree
from megatron_dppo.errors import UserError
from megatron_dppo.trainer.history import METRICS_FILE, History, Series
from megatron_dppo.trainer.plots import smooth

REWARD, EVALUATED, GAP = "reward/mean", "eval/accuracy", "mismatch/mean_abs_pi_mu"
Arms = Mapping[str, Mapping[int, History]]
"""Runs by arm and seed."""
LEARNS = 0.5
"""A run learns if, at its end, it has this share of the gain of the experiment's best run."""
AXES = {
    "rates": ("learning rate", "the largest rate that still learns"),
    "staleness": ("staleness in steps", "the largest staleness that still learns"),
    "noise": ("noise on the engine's weights, of their root mean square", "the largest noise with which it learns"),
}


@dataclass(frozen=True)
class Ended:
    """How a run began and ended: means over the first step's answers and over those of the last tenth of its steps."""

    steps: int
    start: float
    end: float
    mismatch: float
    """Mean |pi - mu| with one set of weights on both sides; of stale answers with the drift."""
    worst: float
    """Largest |pi - mu| of a token at the end."""
    masked: float
    """Share of tokens, over all steps."""

    @staticmethod
    def of(history: History) -> Ended:
        reward = history[REWARD]
        tail = max(1, len(reward) // 10)
        gap, worst = history[GAP], history["mismatch/max_abs_pi_mu"]
        if not len(gap):
            gap, worst = history["policy/mean_abs_pi_mu"], history["policy/abs_prob_diff_max"]
        return Ended(
            steps=int(reward.steps[-1]),
            start=float(reward.values[0]),
            end=float(reward.values[-tail:].mean()),
            mismatch=float(gap.values[-tail:].mean()),
            worst=float(worst.values[-tail:].mean()),
            masked=float(history["policy/masked_fraction"].values.mean()),
        )


def report(out: Path) -> int:
    """Write and print the tables, draw the pictures. Raises UserError where there is no run."""
    found = {name: arms for name in ("learn", "replay", *AXES) if (arms := _runs(out, name))}
    if not found:
        raise UserError(f"{out}: holds no run of the study ({out}/EXPERIMENT/ARM/seed-N)")
    parts = []
    for name, arms in found.items():
        parts += [f"## {name}", "\n".join(_learned(arms) if name == "learn" else _ended(arms))]
        if name in AXES:
            parts.append("\n".join(_largest(arms, AXES[name][1])))
    text = "\n\n".join(parts) + "\n"
    (out / "study.md").write_text(text)
    print(text)
    if "learn" in found:
        plot_learning(found["learn"], out / "learn.png")
    if swept := {name: arms for name, arms in found.items() if name in AXES}:
        plot_sweeps(swept, out / "study.png")
    if "rates" in found:
        plot_rates(found["rates"], out / "rates.png")
    return 0


def _runs(out: Path, experiment: str) -> Arms:
    """The runs of each arm, by seed, as far as they came: one that is in its first step has nothing yet."""
    arms: dict[str, dict[int, History]] = {}
    for file in sorted((out / experiment).glob(f"**/seed-*/{METRICS_FILE}")):
        if not file.stat().st_size:
            continue
        history = History.read(file)
        if len(history[REWARD]):
            arm = str(file.parent.parent.relative_to(out / experiment))
            arms.setdefault(arm, {})[int(file.parent.name.removeprefix("seed-"))] = history
    if arms and experiment == "staleness":  # without it they are runs of `rates`
        rate = read_tree(next((out / experiment).glob("**/config.yaml")))["optimizer"]["lr"]
        fresh = ((arm.partition("/"), runs) for arm, runs in _runs(out, "rates").items())
        arms |= {f"{algorithm}/0": dict(runs) for (algorithm, _, value), runs in fresh if float(value) == float(rate)}
    return dict(sorted(arms.items(), key=lambda item: _place(item[0])))


def _place(arm: str) -> tuple[int, float, str]:
    algorithm, _, value = arm.partition("/")
    known = list(LABELS)
    return (known.index(algorithm) if algorithm in known else -1, float(value or 0), arm)


def _learned(arms: Arms) -> Iterator[str]:
    yield "| | seeds | steps | held-out accuracy before | after | well-formed before | after | minutes |"
    yield "|---|---|---|---|---|---|---|---|"
    for arm, runs in arms.items():
        steps = {int(one[REWARD].steps[-1]) for one in runs.values()}
        cells = [arm, str(len(runs)), _between(sorted(steps))]
        for metric in (EVALUATED, "eval/well_formed"):
            cells += [_spread([one[metric].values[end] for one in runs.values()], ".3f") for end in (0, -1)]
        seconds = [sum(one[f"time/{part}_s"].values.sum() for part in ("step", "eval")) for one in runs.values()]
        yield f"| {' | '.join([*cells, _spread([s / 60 for s in seconds], '.1f')])} |"


def _ended(arms: Arms) -> Iterator[str]:
    yield "| | seeds | steps | reward at first | at the end | mean \\|pi - mu\\| at the end | largest | masked |"
    yield "|---|---|---|---|---|---|---|---|"
    for arm, runs in arms.items():
        ends = [Ended.of(one) for one in runs.values()]
        algorithm, _, value = arm.partition("/")
        cells = [
            f"{LABELS.get(algorithm, algorithm)} {value}",
            str(len(runs)),
            _between(sorted({e.steps for e in ends})),
        ]
        for get, spec in _CELLS:
            cells.append(_spread([get(one) for one in ends], spec))
        yield f"| {' | '.join(cells)} |"


_CELLS: tuple[tuple[Callable[[Ended], float], str], ...] = (
    (lambda one: one.start, ".3f"),
    (lambda one: one.end, ".3f"),
    (lambda one: one.mismatch, ".1e"),
    (lambda one: one.worst, ".2f"),
    (lambda one: one.masked, ".2%"),
)


def largest_that_learns(arms: Arms) -> dict[str, tuple[float | None, ...]]:
    """Per algorithm and seed the largest value of the experiment with which the run learns, None where none does. Runs
    that are not complete do not count."""
    whole = max(len(one[REWARD]) for runs in arms.values() for one in runs.values())
    ended = {
        arm: {seed: Ended.of(one) for seed, one in runs.items() if len(one[REWARD]) == whole}
        for arm, runs in arms.items()
    }
    known = [one for ends in ended.values() for one in ends.values()]
    start = float(np.mean([one.start for one in known]))
    bar = start + LEARNS * (max(one.end for one in known) - start)
    found: dict[str, dict[int, float | None]] = {}
    for arm, ends in ended.items():
        algorithm, _, value = arm.partition("/")
        by_seed = found.setdefault(algorithm, {})
        for seed, one in ends.items():
            best = by_seed.get(seed)
            by_seed[seed] = max(best or 0.0, float(value)) if one.end >= bar else best
    return {algorithm: tuple(by_seed[seed] for seed in sorted(by_seed)) for algorithm, by_seed in found.items()}


def _largest(arms: Arms, what: str) -> Iterator[str]:
    yield f"| | {what}, by seed |"
    yield "|---|---|"
    for algorithm, values in largest_that_learns(arms).items():
        said = ", ".join("none" if value is None else f"{value:g}" for value in values)
        yield f"| {LABELS.get(algorithm, algorithm)} | {said} |"


def plot_learning(arms: Arms, path: Path) -> None:
    """Held-out accuracy and training reward: means over seeds, bands from the lowest to the highest."""
    figure = _figure(1, 2)
    left, right = figure.subplots(1, 2)
    for colour, (arm, runs) in zip(("C0", "C1", "C2", "C3"), arms.items(), strict=False):
        _band(left, [one[EVALUATED] for one in runs.values()], colour, f"{arm}, {len(runs)} seeds", marker="o")
        _band(right, [Series(one[REWARD].steps, smooth(one[REWARD])) for one in runs.values()], colour, arm)
    left.set_title("held-out accuracy, sampled at temperature 1")
    right.set_title("training reward")
    for axis in (left, right):
        axis.set_xlabel("training step")
        axis.set_ylim(0, 1)
        axis.legend()
    figure.savefig(path, format="png")


def plot_rates(arms: Arms, path: Path) -> None:
    """A column per learning rate: reward and mismatch over the steps, by algorithm."""
    rates = sorted({float(arm.partition("/")[2]) for arm in arms})
    algorithms = list(dict.fromkeys(arm.partition("/")[0] for arm in arms))
    figure = _figure(2, len(rates), width=3.6, height=3.0)
    rows = figure.subplots(2, len(rates), squeeze=False, sharey="row")
    for row, (metric, title) in zip(rows, ((REWARD, "reward"), (GAP, r"mean of $|\pi - \mu|$")), strict=True):
        for axis, rate in zip(row, rates, strict=True):
            for colour, algorithm in enumerate(algorithms):
                runs = arms.get(f"{algorithm}/{rate:g}", {}).values()
                if curves := [Series(one[metric].steps, smooth(one[metric])) for one in runs]:
                    _band(axis, curves, f"C{colour}", LABELS.get(algorithm, algorithm))
            axis.set_title(f"{title}, learning rate {rate:g}")
    for axis in rows[1]:
        axis.set_yscale("log")
        axis.set_xlabel("training step")
    rows[0][0].legend()
    figure.savefig(path, format="png")


def plot_sweeps(experiments: Mapping[str, Arms], path: Path) -> None:
    """A row per experiment: reward and mismatch at the end against what was varied, by algorithm."""
    figure = _figure(len(experiments), 2)
    for axes, (name, arms) in zip(
        figure.subplots(len(experiments), 2, squeeze=False), experiments.items(), strict=True
    ):
        algorithms = dict.fromkeys(arm.partition("/")[0] for arm in arms)
        for colour, algorithm in enumerate(algorithms):
            mine = {float(a.partition("/")[2]): runs for a, runs in arms.items() if a.partition("/")[0] == algorithm}
            values = np.array(sorted(mine))
            for axis, get in zip(axes, (lambda one: one.end, lambda one: one.mismatch), strict=True):
                ends = [[get(Ended.of(one)) for one in mine[value].values()] for value in values]
                shown = values if name == "rates" else np.arange(len(values))
                axis.plot(
                    shown, [np.mean(e) for e in ends], "o-", color=f"C{colour}", label=LABELS.get(algorithm, algorithm)
                )
                axis.fill_between(shown, [min(e) for e in ends], [max(e) for e in ends], color=f"C{colour}", alpha=0.15)
                if name == "rates":
                    axis.set_xscale("log", base=2)
                axis.set_xticks(shown, [f"{value:g}" for value in values])
        for axis, title in zip(axes, ("reward at the end", r"mean of $|\pi - \mu|$ at the end"), strict=True):
            axis.set_title(f"{name}: {title}")
            axis.set_xlabel(AXES[name][0])
        axes[1].set_yscale("log")
        axes[0].legend()
    figure.savefig(path, format="png")


def _figure(rows: int, columns: int, *, width: float = 6.2, height: float = 4.0) -> Figure:
    size = (width * columns, height * rows)
    figure = Figure(figsize=size, dpi=120, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
    FigureCanvasAgg(figure)
    return figure


def _band(axis: Axes, curves: Sequence[Series], colour: str, label: str, marker: str = "") -> None:
    """Seeds that got less far leave the line to the others."""
    longest = max(curves, key=len)
    values = np.full((len(curves), len(longest)), np.nan)
    for row, curve in zip(values, curves, strict=True):
        row[: len(curve)] = curve.values
    axis.plot(longest.steps, np.nanmean(values, axis=0), color=colour, linewidth=2.0, label=label, marker=marker)
    axis.fill_between(
        longest.steps, np.nanmin(values, axis=0), np.nanmax(values, axis=0), color=colour, alpha=0.2, linewidth=0
    )
    axis.grid(alpha=0.3)


def _spread(values: Sequence[float], spec: str) -> str:
    mean = format(float(np.mean(values)), spec)
    return mean if len(values) == 1 else f"{mean} ({min(values):{spec}} to {max(values):{spec}})"


def _between(values: Sequence[int]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"
