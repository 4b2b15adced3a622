"""Figure 1, left: what an algorithm's objective and mask are over the ratio, by the code that trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from megatron_dppo.algorithm import Preset, PresetError, divergence_for, policy_loss, presets
from megatron_dppo.errors import UserError

_POINTS, _WIDEST = 1201, 2.0
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
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(chosen), len(mus), squeeze=False, sharex=True, sharey=True)
    for axes, preset in zip(grid, chosen, strict=True):
        for axis, mu in zip(axes, mus, strict=True):
            for advantage, colour in _COLOURS.items():
                _draw(axis, preset, mu, advantage, colour)
            axis.axvspan(1.0 / mu, max(_WIDEST, 1.0 / mu), color="grey", alpha=0.25, linewidth=0)
            axis.axvline(1.0, color="grey", linewidth=0.8)
            axis.set_title(f"{preset.name}, $\\mu$ = {mu:g}", fontsize=11)
            axis.set_xlim(0.0, _WIDEST)
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
    figure.suptitle(title or "Objective and mask", fontsize=14)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png")
    except OSError as error:
        raise UserError(f"{path}: cannot write the plot: {error.strerror}") from error


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
    ratio = np.linspace(0.0, min(_WIDEST, 1.0 / mu), _POINTS)
    value, kept = objective_and_mask(preset, mu, advantage, ratio)
    axis.plot(ratio, np.where(kept, value, np.nan), color=colour, linewidth=2.5)
    axis.plot(ratio, np.where(kept, np.nan, value), color=colour, linewidth=1.5, linestyle=":")
    low, high = sorted((0.0, _WIDEST * advantage))
    axis.fill_between(ratio, low, high, where=~kept, color=colour, alpha=0.1, linewidth=0)


def _preset(name: str) -> Preset:
    preset, _, constants = name.partition(":")
    try:
        return presets.get(preset, constants=constants or None)
    except PresetError as error:
        raise UserError(f"plot: {error}") from error
