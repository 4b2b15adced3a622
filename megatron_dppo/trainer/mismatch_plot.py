"""The picture of a mismatch; apart, since ranks keep one and draw none, and matplotlib takes most of a second."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, NullFormatter

from megatron_dppo.errors import UserError
from megatron_dppo.trainer.mismatch import Mismatch
from megatron_dppo.trainer.plots import plain, write_png

_BINS = 24


def plot_mismatch(runs: Mapping[str, Mismatch], path: Path, *, title: str = "") -> None:
    """Write `draw_mismatch` as a PNG. Errors: also `UserError` when the file cannot be written."""
    write_png(draw_mismatch(runs, title=title), path)


def draw_mismatch(runs: Mapping[str, Mismatch], *, title: str = "") -> Figure:
    """Per run a row with pi / mu (left) and |pi - mu|, the binary TV divergence (right), against mu.

    A dot is a token; the line is the median of the tokens of like probability, the band holds 98 % of them.
    Errors: `UserError` when there is no run.
    """
    if not runs:
        raise UserError("plot: name at least one run")
    size = (12.0, 1.2 + 4.0 * len(runs))
    figure = Figure(figsize=size, dpi=120, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
    grid = figure.subplots(len(runs), 2, squeeze=False, sharex=True)
    for (left, right), (label, mismatch) in zip(grid, runs.items(), strict=True):
        logps = {"routes replayed": mismatch.log_pi, "live routers": mismatch.log_pi_live}
        if np.array_equal(mismatch.log_pi, mismatch.log_pi_live):
            logps = {"": mismatch.log_pi}
        for number, (name, log_pi) in enumerate(reversed(logps.items())):
            mu, pi = np.exp(mismatch.log_mu.astype(np.float64)), np.exp(log_pi.astype(np.float64))
            colour = f"C{len(logps) - 1 - number}"
            _cloud(left, mu, pi / mu, colour, name)
            _cloud(right, mu, np.maximum(np.abs(pi - mu), 1e-9), colour, name)
        _around_one(left, max(float(np.abs(log_pi - mismatch.log_mu).max()) for log_pi in logps.values()))
        right.set_yscale("log")
        left.set_ylabel("ratio  $\\pi / \\mu$")
        right.set_ylabel("TV divergence  $|\\pi - \\mu|$")
        left.set_title(f"{plain(label)}: probability ratio", fontsize=12)
        right.set_title(f"{plain(label)}: binary TV divergence", fontsize=12)
        for axis in (left, right):
            axis.set_xlabel("probability of the sampled token  $\\mu$")
            axis.tick_params(labelbottom=True)
            axis.grid(alpha=0.3)
        if len(logps) > 1:
            left.legend(fontsize=9)
    figure.suptitle(plain(title) or "Trainer against engine, same weights", fontsize=14)
    return figure


def _cloud(axis: Axes, mu: np.ndarray, values: np.ndarray, colour: str, label: str) -> None:
    """Dots, the median by bin of mu, and the band from the 1st to the 99th percentile."""
    axis.set_xscale("log")
    few = len(mu) < 5000  # larger and darker, so that single dots are seen
    axis.scatter(mu, values, s=9 if few else 3, color=colour, alpha=0.5 if few else 0.15, linewidths=0, rasterized=True)
    edges = np.logspace(np.log10(max(mu.min(), 1e-8)), 0.0, _BINS + 1)
    number = np.clip(np.digitize(mu, edges) - 1, 0, _BINS - 1)
    middle, bands = [], []
    for one in range(_BINS):
        inside = values[number == one]
        if len(inside) >= 5:
            middle.append(np.sqrt(edges[one] * edges[one + 1]))
            bands.append(np.quantile(inside, [0.01, 0.5, 0.99]))
    if bands:
        low, median, high = np.array(bands).T
        axis.plot(middle, median, color=colour, linewidth=2.0, label=label)
        axis.fill_between(middle, low, high, color=colour, alpha=0.2, linewidth=0)


def _around_one(axis: Axes, largest_gap: float) -> None:
    """A ratio's axis: 1 in the middle, logarithmic where ratios go far."""
    axis.axhline(1.0, color="black", linewidth=0.8)
    reach = max(1.1 * largest_gap, 1e-6)
    axis.set_ylim(np.exp(-reach), np.exp(reach))
    if reach > 0.7:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter() if reach > 2.3 else FuncFormatter(lambda value, _: f"{value:g}"))
