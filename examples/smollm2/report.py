"""Tables and pictures of what `study.py` ran: OUT/study.md, and pictures beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from examples.stability_study.study import LABELS
from megatron_dppo.config.load import read_tree
from megatron_dppo.errors import UserError
from megatron_dppo.trainer.history import METRICS_FILE, History, Series
from megatron_dppo.trainer.plots import smooth

REWARD, EVALUATED, STALENESS = "reward/mean", "eval/accuracy", "rollout/staleness_mean"
GAP, TRAINED = "mismatch/mean_abs_pi_mu", "policy/mean_abs_pi_mu"
Arms = Mapping[str, Mapping[int, History]]
"""Runs by arm and seed."""
LEARNS = 0.5
"""A run learns if it has this share of the gain of the experiment's best run."""
TAIL = 0.2
"""Share of a run's steps that its end is: each step has other questions, and some are harder."""
AXES = {
    "rates": ("learning rate", "the largest rate that still learns"),
    "staleness": ("staleness in steps", "the largest staleness that still learns"),
    "noise": ("noise on the engine's weights, of their root mean square", "the largest noise with which it learns"),
}


@dataclass(frozen=True)
class Ended:
    """How a run began and ended: means over the first step's answers and over those of the last fifth of its steps."""

    start: float
    end: float
    """Reward of the policy that had made `policy` steps and of those just before it."""
    mismatch: float
    """Mean |pi - mu| with one set of weights on both sides; NaN where the answers were stale."""
    trained: float
    """Mean |pi - mu| of the tokens trained on, each when it was: the mismatch, and how far the policy went since."""
    worst: float
    """Largest |pi - mu| of one of those tokens."""
    masked: float
    """Share of tokens, over all steps."""

    @staticmethod
    def of(history: History, policy: int) -> Ended:
        reward = by_policy(history)
        tail = max(1, round(TAIL * len(reward)))
        steps = history[REWARD].steps

        def last(metric: str, of: Callable[[np.ndarray], float] = np.mean) -> float:
            found = history[metric]
            values = found.values[found.steps > steps[-1] - tail]
            return float(of(values)) if len(values) else np.nan

        return Ended(
            start=float(reward.values[0]),
            end=float(reward.values[reward.steps <= policy][-tail:].mean()),
            mismatch=last(GAP),
            trained=last(TRAINED),
            worst=last("policy/abs_prob_diff_max", np.max),
            masked=float(history["policy/masked_fraction"].values.mean()),
        )


def by_policy(history: History) -> Series:
    """The rewards, in the order of the steps, over the training steps that the policy which answered had made. Answers
    that are k steps old, in the mean and rounded, show at step n the policy that step n - 1 - k left."""
    ages = np.rint(history[STALENESS].values).astype(np.int64)
    return Series(history[REWARD].steps - 1 - ages, history[REWARD].values)


def last_of_all(arms: Arms) -> int:
    """The steps of the last policy whose answers every run has: what can be compared where staleness differs."""
    return min(int(by_policy(one).steps[-1]) for runs in arms.values() for one in runs.values())


def comparable(arms: Arms) -> Arms:
    """What runs that were ended early can be compared by: the steps that all have which made, but for `TAIL` at most,
    those of the longest. Others are left out."""
    longest = max(_made(one) for runs in arms.values() for one in runs.values())
    kept = {
        arm: {seed: one for seed, one in runs.items() if _made(one) >= (1 - TAIL) * longest}
        for arm, runs in arms.items()
    }
    steps = min(_made(one) for runs in kept.values() for one in runs.values())
    return {arm: {seed: _cut(one, steps) for seed, one in runs.items()} for arm, runs in kept.items() if runs}


def _made(history: History) -> int:
    return int(history[REWARD].steps[-1])


def _cut(history: History, steps: int) -> History:
    within = {name: one.steps <= steps for name, one in history.series.items()}
    return History(
        {name: Series(one.steps[within[name]], one.values[within[name]]) for name, one in history.series.items()}
    )


def report(out: Path) -> int:
    """Write and print the tables, draw the pictures. Raises UserError where there is no run."""
    found = {name: arms for name in ("learn", "replay", *AXES) if (arms := _runs(out, name))}
    if not found:
        raise UserError(f"{out}: holds no run of the study ({out}/EXPERIMENT/ARM/seed-N)")
    same = {name: arms if name == "learn" else comparable(arms) for name, arms in found.items()}
    parts = []
    for name, arms in same.items():
        parts.append(f"## {name}")
        if name != "learn":
            parts.append("\n".join(_ended(arms, found[name])))
        parts.append("\n".join(_largest(arms, AXES[name][1]) if name in AXES else _learned(arms)))
        runs = ((arm, seed, one) for arm, seeds in found[name].items() for seed, one in seeds.items())
        if early := [
            f"{arm}/seed-{seed} after {_made(one)}" for arm, seed, one in runs if seed not in arms.get(arm, {})
        ]:
            parts.append(f"Left out, since they ended early: {', '.join(early)}.")
    text = "\n\n".join(parts) + "\n"
    (out / "study.md").write_text(text)
    print(text)
    for name in same.keys() - AXES.keys():
        plot_learning(same[name], out / f"{name}.png")
    if swept := {name: arms for name, arms in same.items() if name in AXES}:
        plot_sweeps(swept, out / "study.png")
    for name in swept:
        plot_curves(name, swept[name], out / f"{name}.png")
    return 0


def _runs(out: Path, experiment: str) -> Arms:
    """The runs of each arm, by seed, as far as they came: one that is in its first step has nothing yet."""
    arms: dict[str, dict[int, History]] = {}
    for file in sorted((out / experiment).glob(f"**/seed-*/{METRICS_FILE}")):
        if not file.stat().st_size:
            continue
        history = History.read(file)
        if len(history[REWARD]):
            if np.isfinite(history[STALENESS].values).sum() != len(history[REWARD]):
                raise UserError(f"{file}: {STALENESS} is not a number in every step; take the run out")
            arm = str(file.parent.parent.relative_to(out / experiment))
            arms.setdefault(arm, {})[int(file.parent.name.removeprefix("seed-"))] = history
    if arms and experiment == "staleness":  # without it they are runs of `rates`
        file = next((out / experiment).glob("**/config.yaml"), None)
        if file is None:
            raise UserError(
                f"{out / experiment}: no config.yaml, which says at what rate; copy what a run's folder holds"
            )
        rate = read_tree(file)["optimizer"]["lr"]
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
            known = [one[metric].values for one in runs.values() if len(one[metric])]
            cells += [_spread([values[end] for values in known], ".3f") for end in (0, -1)]
        seconds = [sum(one[f"time/{part}_s"].values.sum() for part in ("step", "eval")) for one in runs.values()]
        yield f"| {' | '.join([*cells, _spread([s / 60 for s in seconds], '.1f')])} |"


def _ended(arms: Arms, whole: Arms) -> Iterator[str]:
    policy = last_of_all(arms)
    yield (
        f"| | seeds | steps | reward at first | of the policy after {policy} steps | mean \\|pi - mu\\| at the end, "
        "same weights | of the tokens trained on | largest | masked |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for arm, runs in arms.items():
        ends = [Ended.of(one, policy) for one in runs.values()]
        algorithm, _, value = arm.partition("/")
        cells = [
            f"{LABELS.get(algorithm, algorithm)} {value}",
            str(len(runs)),
            _between(sorted({_made(whole[arm][seed]) for seed in runs})),
        ]
        for get, spec in _CELLS:
            cells.append(_spread([get(one) for one in ends], spec))
        yield f"| {' | '.join(cells)} |"


_CELLS: tuple[tuple[Callable[[Ended], float], str], ...] = (
    (lambda one: one.start, ".3f"),
    (lambda one: one.end, ".3f"),
    (lambda one: one.mismatch, ".1e"),
    (lambda one: one.trained, ".1e"),
    (lambda one: one.worst, ".2f"),
    (lambda one: one.masked, ".2%"),
)


def largest_that_learns(arms: Arms) -> dict[str, tuple[float | None, ...]]:
    """Per algorithm and seed the largest value of the experiment with which the run learns, None where none does."""
    policy = last_of_all(arms)
    ended = {arm: {seed: Ended.of(one, policy) for seed, one in runs.items()} for arm, runs in arms.items()}
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
    """Held-out accuracy, training reward and mismatch: means over seeds, bands from the lowest to the highest."""
    figure = _figure(1, 3, width=4.8)
    left, middle, right = figure.subplots(1, 3)
    for colour, (arm, runs) in zip(("C0", "C1", "C2", "C3"), arms.items(), strict=False):
        _band(left, [one[EVALUATED] for one in runs.values()], colour, f"{arm}, {len(runs)} seeds", marker="o")
        _band(middle, [_smooth(one[REWARD]) for one in runs.values()], colour, arm)
        _band(right, [_smooth(one[GAP]) for one in runs.values()], colour, arm)
    left.set_title("held-out accuracy, sampled at temperature 1")
    middle.set_title("training reward")
    right.set_title(r"mean of $|\pi - \mu|$, same weights")
    for axis in (left, middle, right):
        axis.set_xlabel("training step")
        axis.legend()
    for axis in (left, middle):
        axis.set_ylim(0, 1)
    right.set_ylim(bottom=0)
    figure.savefig(path, format="png")


def plot_curves(name: str, arms: Arms, path: Path) -> None:
    """A column per value of the experiment: reward by the policy that answered, and mean |pi - mu|, by algorithm."""
    columns = sorted({float(arm.partition("/")[2]) for arm in arms})
    algorithms = list(dict.fromkeys(arm.partition("/")[0] for arm in arms))
    gap = TRAINED if name == "staleness" else GAP
    figure = _figure(2, len(columns), width=3.6, height=3.0)
    rows = figure.subplots(2, len(columns), squeeze=False, sharex="col", sharey="row")
    for above, below, value in zip(*rows, columns, strict=True):
        for colour, algorithm in enumerate(algorithms):
            if runs := arms.get(f"{algorithm}/{value:g}", {}).values():
                label = LABELS.get(algorithm, algorithm)
                _band(above, [_smooth(by_policy(one)) for one in runs], f"C{colour}", label)
                _band(below, [_smooth(one[gap]) for one in runs], f"C{colour}", label)
        above.set_title(f"{name}: {value:g}")
        above.set_xlabel("steps of the policy that answered")
        below.set_xlabel("training step")
    rows[0][0].set_ylabel("reward")
    rows[1][0].set_ylabel(r"mean of $|\pi - \mu|$" + (" of trained tokens" if gap == TRAINED else ""))
    rows[1][0].set_yscale("log")
    rows[0][0].legend()
    figure.savefig(path, format="png")


def _smooth(series: Series) -> Series:
    return Series(series.steps, smooth(series))


def plot_sweeps(experiments: Mapping[str, Arms], path: Path) -> None:
    """A row per experiment: reward and mismatch at the end against what was varied, by algorithm."""
    figure = _figure(len(experiments), 2)
    for axes, (name, arms) in zip(
        figure.subplots(len(experiments), 2, squeeze=False), experiments.items(), strict=True
    ):
        algorithms, policy = dict.fromkeys(arm.partition("/")[0] for arm in arms), last_of_all(arms)
        for colour, algorithm in enumerate(algorithms):
            mine = {float(a.partition("/")[2]): runs for a, runs in arms.items() if a.partition("/")[0] == algorithm}
            values = np.array(sorted(mine))
            for axis, get in zip(axes, (lambda one: one.end, lambda one: one.trained), strict=True):
                ends = [[get(Ended.of(one, policy)) for one in mine[value].values()] for value in values]
                shown = values if name == "rates" else np.arange(len(values))
                axis.plot(
                    shown, [np.mean(e) for e in ends], "o-", color=f"C{colour}", label=LABELS.get(algorithm, algorithm)
                )
                axis.fill_between(shown, [min(e) for e in ends], [max(e) for e in ends], color=f"C{colour}", alpha=0.15)
                if name == "rates":
                    axis.set_xscale("log", base=2)
                axis.set_xticks(shown, [f"{value:g}" for value in values])
        for axis, title in zip(
            axes, (f"reward after {policy} steps", r"mean of $|\pi - \mu|$ of trained tokens"), strict=True
        ):
            axis.set_title(f"{name}: {title}")
            axis.set_xlabel(AXES[name][0])
        axes[1].set_yscale("log")
        axes[0].legend()
    figure.savefig(path, format="png")


def _figure(rows: int, columns: int, *, width: float = 6.2, height: float = 4.0) -> Figure:
    size = (width * columns, height * rows)
    figure = Figure(figsize=size, dpi=120, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
    return figure


def _band(axis: Axes, curves: Sequence[Series], colour: str, label: str, marker: str = "") -> None:
    """Seeds that got less far leave the line to the others."""
    if not (curves := [curve for curve in curves if len(curve)]):
        return
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
    known = [value for value in values if not np.isnan(value)]
    if not known:
        return "-"
    mean = format(float(np.mean(known)), spec)
    return mean if len(known) == 1 else f"{mean} ({min(known):{spec}} to {max(known):{spec}})"


def _between(values: Sequence[int]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"
