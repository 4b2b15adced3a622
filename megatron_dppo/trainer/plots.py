"""The picture of a run, in the manner of the paper's Figure 11; and of an algorithm (Figure 1, left): what its
objective and mask are over the ratio, by the code that trains."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter

from megatron_dppo.algorithm import Preset, PresetError, TrustRegion, divergence_for, policy_loss, presets
from megatron_dppo.errors import UserError, file_errors
from megatron_dppo.trainer.history import History, Series

_SET = re.compile(r"eval/[^/]+/accuracy")

SMOOTHING_SIGMA = 2.0
"""Standard deviation, in steps, of the Gaussian filter of Appendix G.1."""


@dataclass(frozen=True)
class Panel:
    """One metric of training, and optionally one measured on held-out prompts (drawn with markers, not smoothed)."""

    title: str
    unit: str
    metric: str
    held_out: str = ""
    fraction: bool = False


PANELS = (
    Panel("Reward", "mean per answer", "reward/mean"),
    Panel("Accuracy", "answers that are right", "reward/accuracy", held_out="eval/accuracy", fraction=True),
    Panel("Mismatch, same weights", r"mean of $|\pi - \mu|$", "mismatch/mean_abs_pi_mu"),
    Panel(r"Mismatch where $\mu < 0.1$", r"mean of $|\log \pi / \mu|$, nats", "mismatch/abs_log_ratio_low"),
    Panel("Mismatch and drift within a step", r"mean of $|\pi - \mu|$", "policy/mean_abs_pi_mu"),
    Panel("Response length", "tokens", "response/length_mean"),
    Panel("Entropy", "nats per token", "policy/entropy"),
    Panel("Masked tokens", "of all response tokens", "policy/masked_fraction", fraction=True),
)
"""What is drawn of every run: the first of the paper's Figure 11, its mismatch apart from the drift of the policy."""
REFERENCE_KL = Panel("KL to the reference", "nats per token", "policy/reference_kl_mean")
MASKED_PANELS = (
    Panel("Reward", "mean per answer", "reward/mean"),
    Panel("Masked tokens, $A > 0$", r"mean rollout probability $\mu$", "policy/masked_mu_positive"),
    Panel("Masked tokens, $A < 0$", r"mean rollout probability $\mu$", "policy/masked_mu_negative"),
    Panel("Masked tokens", "of all response tokens", "policy/masked_fraction", fraction=True),
    Panel("Masked tokens, $A > 0$", "mean entropy, nats", "policy/masked_entropy_positive"),
    Panel("Masked tokens, $A < 0$", "mean entropy, nats", "policy/masked_entropy_negative"),
)
"""Figure 6, either sign of the advantage apart."""


def panels_for(runs: Mapping[str, History]) -> list[Panel]:
    """`PANELS`; after the accuracy one for every evaluation set of a run, as Figure 11 has AIME24 and AIME25; and the
    KL to a reference, where a run has one."""
    names = sorted({name.split("/")[1] for history in runs.values() for name in history.series if _SET.fullmatch(name)})
    sets = [Panel(f"{name} avg@n", "answers that are right", "", held_out=f"eval/{name}/accuracy", fraction=True)
            for name in names]  # fmt: skip
    kl = [REFERENCE_KL] if any(REFERENCE_KL.metric in history.series for history in runs.values()) else []
    return [*PANELS[:2], *sets, *PANELS[2:], *kl]


def draw_runs(
    runs: Mapping[str, History], *, title: str = "", panels: Sequence[Panel] | None = None, by_time: bool = False
) -> Figure:
    """One panel per metric (`panels_for` the runs when absent), one colour per run (label -> history).

    As in the paper, training curves are smoothed by a Gaussian filter with a standard deviation of 2 steps, over the
    unsmoothed curve in a paler shade; held-out evaluations are shown as measured, those of evaluation sets with their
    bootstrap interval. Panels of metrics that no run logged say so. `by_time` draws all over the minutes that the
    steps took. Errors: `UserError` when there is no run.
    """
    if not runs:
        raise UserError("plot: name at least one run")
    runs = {plain(label): history for label, history in runs.items()}
    if by_time:
        runs = {label: history.by_time() for label, history in runs.items()}
    chosen = panels_for(runs) if panels is None else panels
    rows = -(-len(chosen) // 3)
    figure = Figure(figsize=(13.5, 3.7 * rows), dpi=120, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
    axes = figure.subplots(rows, 3, squeeze=False).ravel()
    for axis in axes[len(chosen) :]:
        axis.set_axis_off()
    for axis, panel in zip(axes, chosen, strict=False):
        empty = True
        for number, (label, history) in enumerate(runs.items()):
            colour = f"C{number}"
            curve, held_out = _drawable(history[panel.metric]), _drawable(history[panel.held_out])
            empty = empty and not len(curve) and not len(held_out)
            if len(curve):
                axis.plot(curve.steps, curve.values, color=colour, alpha=0.25, linewidth=1.0)
                name = f"{label}, training" if panel.held_out else label
                axis.plot(curve.steps, smooth(curve), color=colour, linewidth=2.0, label=name)
            if len(held_out):
                style = {"linestyle": "--", "marker": "o", "markersize": 4.5, "linewidth": 1.3}
                name = f"{label}, held-out" if panel.metric else label
                axis.plot(held_out.steps, held_out.values, color=colour, label=name, **style)
                low, high = history[f"{panel.held_out}_low"], history[f"{panel.held_out}_high"]
                if not panel.metric and len(low) == len(high) == len(held_out):
                    axis.fill_between(low.steps, low.values, high.values, color=colour, alpha=0.15, linewidth=0)
        if empty:
            axis.text(0.5, 0.5, "not logged", ha="center", va="center", transform=axis.transAxes, color="grey")
        axis.set_title(panel.title, fontsize=13)
        axis.set_xlabel("minutes of training steps" if by_time else "training step")
        axis.set_ylabel(panel.unit)
        axis.xaxis.set_major_locator(MaxNLocator("auto", integer=not by_time))
        axis.grid(alpha=0.3)
        if panel.fraction:
            axis.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
        if panel.held_out and panel.metric and not empty:
            if len(runs) == 1:
                axis.legend(fontsize=9)
            else:  # the colours are explained below the panels
                kinds = [Line2D([], [], color="grey", label="training"),
                         Line2D([], [], color="grey", label="held-out", linestyle="--", marker="o")]  # fmt: skip
                axis.legend(handles=kinds, fontsize=9)
    if len(runs) > 1:
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=min(len(runs), 5))
    figure.suptitle(plain(title), fontsize=15)
    return figure


def plot_runs(runs: Mapping[str, History], path: Path, **options: Any) -> None:
    """Write `draw_runs` as a PNG. Errors: also `UserError` when the file cannot be written."""
    write_png(draw_runs(runs, **options), path)


def write_png(figure: Figure, path: Path) -> None:
    """Without pyplot, whose global state and choice of a display have no place in a trainer. Errors: `UserError`, or
    `SystemFault`, where the file cannot be written."""
    with file_errors(f"{path}: cannot write the plot"):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png")


def plain(text: str) -> str:
    """Somebody's name for matplotlib, which takes what stands between dollars for mathematics, and leaves names that
    begin with `_` out of legends."""
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")


def _drawable(series: Series) -> Series:
    """Without numbers for which matplotlib has no axis."""
    return Series(series.steps, np.clip(series.values, -1e30, 1e30))


def smooth(series: Series, sigma: float = SMOOTHING_SIGMA) -> np.ndarray:
    """Gaussian filter over the row number, cut at 4 sigma and renormalised at the ends and around NaN, `[n]`."""
    offsets = np.arange(-int(4 * sigma), int(4 * sigma) + 1)
    kernel = np.exp(-0.5 * (offsets / sigma) ** 2)
    known = np.isfinite(series.values)
    reach = len(offsets) // 2
    total = np.convolve(np.where(known, series.values, 0.0), kernel)[reach : reach + len(series)]
    weight = np.convolve(known.astype(float), kernel)[reach : reach + len(series)]
    return np.divide(total, weight, out=np.full(len(series), np.nan), where=weight > 0)


_POINTS = 1201
_COLOURS = {1.0: "C0", -1.0: "C3"}


def plot_objectives(names: Sequence[str], mus: Sequence[float], path: Path, *, title: str = "") -> None:
    """Write a PNG: a row per preset (`PRESET` or `PRESET:CONSTANTS`), a column per rollout probability mu, a colour for
    either sign of the advantage. A line is min(r, C) A over r = pi / mu, A = 1 and -1: solid where the token is kept,
    dotted over a shade where the mask blocks it; grey is where pi would exceed 1.

    The token is a response of its own, all other tokens are one, and the recomputed policy is mu: top-K divergences are
    then the binary ones, and ratios of sequences those of the token. Errors: UserError for an unknown preset, a mu
    outside (0, 1), or a file that cannot be written.
    """
    if wrong := [mu for mu in mus if not 0 < mu < 1]:
        raise UserError(f"plot: --mu {wrong[0]:g} must be between 0 and 1")
    chosen = [_preset(name) for name in names]
    size = (max(6.0, 4.2 * len(mus)), 1.2 + 3.4 * len(chosen))
    figure = Figure(figsize=size, dpi=120, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
    grid = figure.subplots(len(chosen), len(mus), squeeze=False, sharex="row", sharey="row")
    for axes, preset in zip(grid, chosen, strict=True):
        widest = widest_ratio(preset)
        for axis, mu in zip(axes, mus, strict=True):
            for advantage, colour in _COLOURS.items():
                _draw(axis, preset, mu, advantage, colour)
            axis.axvspan(1.0 / mu, max(widest, 1.0 / mu), color="grey", alpha=0.25, linewidth=0)
            axis.axvline(1.0, color="grey", linewidth=0.8)
            axis.set_title(f"{preset.name}, $\\mu$ = {mu:g}", fontsize=11)
            axis.set_xlim(0.0, widest)
            axis.grid(alpha=0.3)
        axes[0].set_ylabel(f"objective  $r A$\n({preset.constants})")
    for axis in grid[-1]:
        axis.set_xlabel("ratio  $r = \\pi / \\mu$")
    handles = [
        *(Line2D([], [], color=colour, linewidth=2.5, label=f"$A = {a:g}$") for a, colour in _COLOURS.items()),
        Line2D([], [], color="black", linewidth=1.5, linestyle=":", label="blocked: no gradient"),
        Patch(color="grey", alpha=0.25, label="$\\pi > 1$"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    figure.suptitle(plain(title) or "Objective and mask", fontsize=14)
    write_png(figure, path)


def widest_ratio(preset: Preset) -> float:
    """Up to which ratio a preset is drawn: 2, as in the paper, or beyond a limit of its own that lies further."""
    limits = [preset.dual_clip, preset.band_high]
    if preset.trust_region is TrustRegion.NONE:
        limits.append(preset.ratio_cap)
    return max([2.0, *(1.25 * limit for limit in limits if limit is not None and np.isfinite(limit))])


def objective_and_mask(preset: Preset, mu: float, advantage: float, ratio: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """min(r, C) A `[n]`, and whether the token is kept, bool `[n]`, where pi = r mu."""
    rows = len(ratio)
    mu_logp = torch.full((rows,), mu, dtype=torch.float64).log()
    logp = mu_logp + torch.from_numpy(ratio).clamp(min=1e-12).log()
    recomputed = mu_logp if preset.needs_recomputed_logp else None
    topk = {}
    if preset.needs_topk:
        preset = replace(preset, topk=1)
        columns = {"mu_topk_logp": mu_logp, "topk_logp": logp, "recomputed_topk_logp": mu_logp}
        topk = {name: torch.stack([values, values], dim=1) for name, values in columns.items()}
        topk["topk_member"] = torch.tensor([[True, False]]).expand(rows, 2)
    loss = policy_loss(
        preset,
        logp,
        mu_logp,
        torch.full((rows,), advantage, dtype=torch.float64),
        loss_mask=torch.ones(rows, dtype=torch.bool),
        divergence=divergence_for(preset, logp=logp, mu_logp=mu_logp, recomputed_logp=recomputed, **topk),
        recomputed_logp=recomputed,
        sequence_ids=torch.arange(rows),
    )
    return loss.ratio.clamp(max=preset.ratio_cap).numpy() * advantage, loss.mask.numpy()


def _draw(axis: Axes, preset: Preset, mu: float, advantage: float, colour: str) -> None:
    widest = widest_ratio(preset)
    ratio = np.linspace(0.0, min(widest, 1.0 / mu), _POINTS)
    value, kept = objective_and_mask(preset, mu, advantage, ratio)
    axis.plot(ratio, np.where(kept, value, np.nan), color=colour, linewidth=2.5)
    axis.plot(ratio, np.where(kept, np.nan, value), color=colour, linewidth=1.5, linestyle=":")
    low, high = sorted((0.0, widest * advantage))
    axis.fill_between(ratio, low, high, where=~kept, color=colour, alpha=0.1, linewidth=0)


def _preset(name: str) -> Preset:
    preset, _, constants = name.partition(":")
    try:
        return presets.get(preset, constants=constants or None)
    except PresetError as error:
        raise UserError(f"plot: {error}") from error
