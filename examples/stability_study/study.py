"""The stability study of Section 5: which runs, where each stands, and what they show together (Figures 3 to 5).

    python examples/stability_study/study.py plan CONFIG OUT SEEDS ALGORITHMS [a.b=c ...]
    python examples/stability_study/study.py report OUT

`examples/stability_study.sh` uses these.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from megatron_dppo.algorithm import presets
from megatron_dppo.checkpoint.state_folder import finished_states
from megatron_dppo.config.load import load_config
from megatron_dppo.errors import UserError
from megatron_dppo.launch import exit_status
from megatron_dppo.trainer.history import CHECKPOINTS, METRICS_FILE, History, Series, read_rows
from megatron_dppo.trainer.plots import smooth

REWARD, MISMATCH, BAD = "reward/mean", "policy/mean_abs_pi_mu", "policy/bad_update_fraction"

LABELS = {
    "pg-is": "PG-IS",
    "cispo": "PG-TIS (CISPO)",
    "grpo-clip-higher": "GRPO-ClipHigher",
    "minirl": "MiniRL",
    "minirl-tis": "MiniRL-TIS",
    "dppo-binary-tv": "DPPO-Binary-TV",
    "dppo-binary-kl": "DPPO-Binary-KL",
    "dppo-binary-kl-decoupled": "DPPO-Binary-KL, decoupled",
    "mask-0.5": "Mask-0.5",
    "mask-0.8": "Mask-0.8",
    "mask-0.5-recompute": "Mask-0.5-Recompute",
}
"""Presets of the study, and the paper's names for them."""
PEERS = {
    "ppo-dual-clip": "PPO, dual clip",
    "token-mis": "Masked IS, token",
    "icepop": "IcePop",
    "icepop-decoupled": "IcePop, decoupled",
    "sequence-tis": "Truncated IS, sequence",
    "sequence-mis": "Masked IS, sequence",
    "geometric-mis": "Masked by geometric mean",
    "gspo": "GSPO",
}
"""What others compare with, in the study where ALGORITHMS names them."""
NAMES = LABELS | PEERS
FIGURES = {
    "Figure 3: trust regions": tuple(LABELS)[:7],
    "Figure 4: anchor of the trust region": ("dppo-binary-kl", "dppo-binary-kl-decoupled"),
    "Figure 5: minimal masks": ("pg-is", "mask-0.5", "mask-0.8", "mask-0.5-recompute"),
}
PEERS_FIGURE = {"Others, beside DPPO": ("dppo-binary-tv", *PEERS)}
COLLAPSE = 0.5
"""A run has collapsed if its last tenth has less than this share of its best (smoothed) reward."""


@dataclass(frozen=True)
class Outcome:
    """What a run came to. The last tenth of its steps counts as its end."""

    final_reward: float
    best_reward: float
    final_mismatch: float
    most_bad: float
    """Largest share of bad updates in a step (Section 5.3)."""

    @property
    def collapsed(self) -> bool:
        return self.final_reward < COLLAPSE * self.best_reward

    @staticmethod
    def of(history: History) -> Outcome:
        reward, mismatch = history[REWARD], history[MISMATCH]
        tail = max(1, len(reward) // 10)
        return Outcome(
            final_reward=float(reward.values[-tail:].mean()),
            best_reward=float(np.nanmax(smooth(reward))),
            final_mismatch=float(mismatch.values[-tail:].mean()),
            most_bad=float(np.nanmax(history[BAD].values)),
        )


def plan(config_file: Path, out: Path, seeds: str, algorithms: str, overrides: Sequence[str]) -> list[str]:
    """A line `SEED ALGORITHM OPTIONS` for every run, seed by seed, so that a study that is stopped has whole seeds; see
    `options`. No algorithms are all. Raises UserError."""
    if not seeds.split() or not all(seed.isdecimal() for seed in seeds.split()):
        raise UserError(f"SEEDS={seeds}: must be whole numbers, such as '0 1 2'")
    steps = load_config(config_file, overrides).trainer.steps
    return [
        f"{seed} {algorithm} {options(out / algorithm / f'seed-{seed}', algorithm, steps)}"
        for seed in seeds.split()
        for algorithm in algorithms.split() or LABELS
    ]


def options(run: Path, algorithm: str, steps: int) -> str:
    """What `train` needs, beside the configuration, to start `run` or continue it to `steps`; "complete" at the end.

    A run that has metrics but no checkpoint is begun anew. Raises UserError for an algorithm that is not in the study.
    """
    if algorithm not in NAMES:
        raise UserError(f"ALGORITHMS: {algorithm} is not in the study: {' '.join(NAMES)}")
    published = presets.constant_sets(algorithm)
    constants = presets.APPENDIX_D if presets.APPENDIX_D in published else published[0]
    chosen = [f"algorithm.preset={algorithm}", f"algorithm.constants={constants}"]
    if not (run / METRICS_FILE).exists():
        return " ".join(chosen)
    done = max((row["step"] for row in read_rows(run / METRICS_FILE) if REWARD in row), default=0)
    if done >= steps:
        return "complete"
    if finished_states(run / CHECKPOINTS):
        return " ".join([*chosen, "trainer.resume=true"])
    shutil.rmtree(run)
    return " ".join(chosen)


def _has_steps(run: Path) -> bool:
    """Not so where it failed, or was stopped, before its first step was over."""
    file = run / METRICS_FILE
    return file.exists() and any(REWARD in row for row in read_rows(file))


def read_study(out: Path) -> dict[str, list[History]]:
    """The runs of each algorithm, by seed, as far as they came. Raises UserError where there are none."""
    study = {}
    for algorithm in NAMES:
        runs = [run for run in sorted((out / algorithm).glob("seed-*")) if _has_steps(run)]
        if runs:
            study[algorithm] = [History.read(run) for run in runs]
    if not study:
        raise UserError(f"{out}: holds no run of the study ({out}/ALGORITHM/seed-N)")
    return study


def plot_study(study: Mapping[str, Sequence[History]], path: Path) -> None:
    """Write a PNG with a row per figure that a run belongs to: training reward, and mismatch or (Figure 5) bad updates.

    A line is the mean over seeds, smoothed as in `plots`; the band spans the lowest and the highest seed.
    """
    others = PEERS.keys() & study.keys()
    figures = {
        title: names for title, names in (FIGURES | (PEERS_FIGURE if others else {})).items() if study.keys() & {*names}
    }
    figure = Figure(figsize=(12.5, 4.0 * len(figures)), dpi=120, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
    colours = {name: f"C{i}" if i < 10 else "black" for names in (LABELS, PEERS) for i, name in enumerate(names)}
    colours["dppo-binary-tv"] = "black" if others else colours["dppo-binary-tv"]
    axes = figure.subplots(len(figures), 2, squeeze=False)
    for (left, right), (title, names) in zip(axes, figures.items(), strict=True):
        drawn = [name for name in names if name in study]
        second = BAD if title.startswith("Figure 5") else MISMATCH
        for name in drawn:
            _band(left, [h[REWARD] for h in study[name]], colours[name])
            _band(right, [h[second] for h in study[name]], colours[name])
        left.set_title(f"{title}: training reward", fontsize=12)
        left.set_ylabel("mean per answer")
        if second == BAD:
            right.set_title(r"bad updates: $A < 0$ and $\mu - \pi \geq 0.5$", fontsize=12)
            right.set_ylabel("of all response tokens")
            right.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
        else:
            right.set_title(r"mismatch: mean of $|\pi - \mu|$", fontsize=12)
            right.set_ylabel("probability")
        for axis in (left, right):
            axis.set_xlabel("training step")
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            axis.grid(alpha=0.3)
        handles = [Line2D([], [], color=colours[name], linewidth=2, label=NAMES[name]) for name in drawn]
        left.legend(handles=handles, fontsize=8, loc="best")
    seeds = sorted({len(runs) for runs in study.values()})
    count = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    one = "One seed: no spread is known"
    figure.suptitle(
        one if count == "1" else f"Mean of {count} seeds; bands from the lowest to the highest", fontsize=13
    )
    figure.savefig(path, format="png")


def table(study: Mapping[str, Sequence[History]]) -> str:
    """Markdown: per algorithm the mean over seeds and, in brackets, the lowest and the highest."""
    lines = [
        "| algorithm | seeds | steps | reward at the end | best reward | mean \\|pi - mu\\| at the end | "
        "most bad updates in a step | collapsed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in study.items():
        outcomes = [Outcome.of(history) for history in runs]
        steps = sorted({int(history[REWARD].steps[-1]) for history in runs})
        cells = [
            NAMES[name],
            str(len(runs)),
            str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}",
            _spread([o.final_reward for o in outcomes], ".3f"),
            _spread([o.best_reward for o in outcomes], ".3f"),
            _spread([o.final_mismatch for o in outcomes], ".1e"),
            _spread([o.most_bad for o in outcomes], ".2%"),
            f"{sum(o.collapsed for o in outcomes)} of {len(outcomes)}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def report(out: Path) -> int:
    """Write `study.png` and `study.md` into the study's folder and print the table."""
    study = read_study(out)
    plot_study(study, out / "study.png")
    text = table(study)
    (out / "study.md").write_text(text)
    print(f"{text}\n{out / 'study.png'}\n{out / 'study.md'}")
    return 0


def _spread(values: Sequence[float], spec: str) -> str:
    mean = format(float(np.mean(values)), spec)
    return mean if len(values) == 1 else f"{mean} ({min(values):{spec}} to {max(values):{spec}})"


def _band(axis: Axes, curves: Sequence[Series], colour: str) -> None:
    """Seeds that got less far leave the line to the others."""
    longest = max(curves, key=len)
    values = np.full((len(curves), len(longest)), np.nan)
    for row, curve in zip(values, curves, strict=True):
        row[: len(curve)] = smooth(curve)
    axis.plot(longest.steps, np.nanmean(values, axis=0), color=colour, linewidth=2.0)
    if len(curves) > 1:
        low, high = np.nanmin(values, axis=0), np.nanmax(values, axis=0)
        axis.fill_between(longest.steps, low, high, color=colour, alpha=0.15, linewidth=0)


def _main(arguments: Sequence[str]) -> int:
    match arguments:
        case ["plan", config, out, seeds, algorithms, *overrides]:
            print("\n".join(plan(Path(config), Path(out), seeds, algorithms, overrides)))
        case ["report", out]:
            return report(Path(out))
        case _:
            raise UserError("study: plan CONFIG OUT SEEDS ALGORITHMS [a.b=c ...] | report OUT")
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(lambda: _main(sys.argv[1:])))
