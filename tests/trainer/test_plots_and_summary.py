"""The picture and the table at the end of a run."""

from __future__ import annotations

import io
import json
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from scipy.ndimage import gaussian_filter1d

from megatron_dppo.algorithm import presets
from megatron_dppo.cli import _labelled, _parse, _plot, main
from megatron_dppo.errors import UserError
from megatron_dppo.trainer.history import History, Series
from megatron_dppo.trainer.plots import (
    MASKED_PANELS,
    PANELS,
    draw_runs,
    objective_and_mask,
    plot_runs,
    smooth,
    widest_ratio,
)
from megatron_dppo.trainer.progress import Progress
from megatron_dppo.trainer.summary import Took, parity_table, print_summary


def history(seed: int = 0, steps: int = 30) -> History:
    random = np.random.default_rng(seed)
    numbers = np.arange(1, steps + 1)
    series = {panel.metric: Series(numbers, random.random(steps)) for panel in PANELS}
    series["eval/accuracy"] = Series(np.array([0, 10, 30]), np.array([0.25, 0.5, 0.75]))
    series["eval/well_formed"] = Series(np.array([0, 10, 30]), np.array([0.95, 0.96, 1.0]))
    series["time/eval_s"] = Series(np.array([0, 10, 30]), np.array([20.0, 15.0, 5.0]))
    series["time/rollout_s"] = Series(numbers, np.full(steps, 2.0))
    for prefix, gap, differing in (("parity", 5e-6, 0.0), ("parity_without_replay", 0.25, 17.0)):
        series[f"{prefix}/max_abs_logp_gap"] = Series(numbers[:1], np.array([gap]))
        series[f"{prefix}/differing_tokens"] = Series(numbers[:1], np.array([differing]))
    series["throughput/tokens_per_second"] = Series(numbers, np.full(steps, 2300.0))
    return History(series)


def ink_per_panel(path: Path) -> np.ndarray:
    """Share of coloured (not grey) pixels in each cell of the 3 x 3 grid, the last of which is empty."""
    pixels = np.asarray(Image.open(path).convert("RGB")).astype(int)
    coloured = pixels.max(axis=2) - pixels.min(axis=2) > 40
    cells = np.array_split(coloured, 3)
    return np.array([part.mean() for cell in cells for part in np.array_split(cell, 3, axis=1)])


def test_every_panel_shows_its_curve(tmp_path: Path) -> None:
    plot_runs({"dppo-binary-tv": history()}, tmp_path / "new" / "plot.png", title="a run")
    image = Image.open(tmp_path / "new" / "plot.png")
    assert image.format == "PNG"
    assert image.width > 1200
    assert (ink_per_panel(tmp_path / "new" / "plot.png")[: len(PANELS)] > 0.002).all()


def test_a_name_is_text_and_no_markup_of_those_who_show_it(tmp_path: Path) -> None:
    """A run of weeks ends with these."""
    name = "$x_$ and $ [/bold] of [lr=3e-4]"
    plot_runs({name: history(), "other": history(1)}, tmp_path / "plot.png", title=name)
    assert (ink_per_panel(tmp_path / "plot.png")[: len(PANELS)] > 0.002).all()
    shown = io.StringIO()
    console = Console(file=shown, width=100, highlight=False, force_terminal=True)
    with Progress(total_steps=2, title=name, console=console) as progress:
        progress.phase(name)
        progress.look()
    paths = {"metrics": tmp_path / "m"}
    print_summary(history(), title=name, took=Took(200.0, 1.0), paths=paths, console=Console(file=shown, width=100))
    assert shown.getvalue().count(name) >= 3


def test_metrics_beyond_all_axes_are_drawn(tmp_path: Path) -> None:
    wild = history()
    wild.series["reward/mean"] = Series(np.arange(1, 5), np.array([1e308, -1e308, np.inf, np.nan]))
    plot_runs({"wild": wild}, tmp_path / "plot.png")
    assert (ink_per_panel(tmp_path / "plot.png")[: len(PANELS)] > 0.002).all()


def test_a_kl_to_a_reference_has_a_panel_where_there_is_one(tmp_path: Path) -> None:
    plain, kept = history(), history()
    kept.series["policy/reference_kl_mean"] = Series(np.arange(1, 31), np.linspace(0, 0.4, 30))
    plot_runs({"kept": kept, "plain": plain}, tmp_path / "kept.png")
    assert (ink_per_panel(tmp_path / "kept.png") > 0.002).all()
    plot_runs({"plain": plain}, tmp_path / "plain.png")
    assert ink_per_panel(tmp_path / "plain.png")[-1] == 0.0


def test_a_panel_without_data_says_so_and_the_others_are_drawn(tmp_path: Path) -> None:
    partial = history()
    del partial.series["policy/masked_fraction"]
    plot_runs({"a": partial}, tmp_path / "plot.png")
    ink = ink_per_panel(tmp_path / "plot.png")
    assert ink[7] == 0.0
    assert (ink[:7] > 0.002).all()


def test_figure_6(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    rows = [
        {"step": step}
        | {panel.metric: 0.1 * step for panel in MASKED_PANELS if step != 2 or "masked_mu" not in panel.metric}
        for step in range(1, 6)  # in the second no token was blocked
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    picture = tmp_path / "figure6.png"
    assert main(["plot", str(run), "--masked", "-o", str(picture)]) == 0
    pixels = np.asarray(Image.open(picture).convert("RGB")).astype(int)
    coloured = pixels.max(axis=2) - pixels.min(axis=2) > 40
    assert min(part.mean() for row in np.array_split(coloured, 2) for part in np.array_split(row, 3, axis=1)) > 0.001


def test_figure_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "figure1.png"
    chosen = ["ppo-clip", "dppo-binary-tv:appendix-d", "dppo-topk-kl", "gspo"]
    assert main(["plot", "--objective", *chosen, "--mu", "0.1", "0.9", "-o", str(picture)]) == 0
    assert Image.open(picture).size == (1008, 1776)
    for arguments, message in (
        (["--objective", "ppo-clp"], "plot: unknown preset 'ppo-clp'; did you mean ppo-clip"),
        (["--objective", "ppo-clip:appendix-d"], "plot: preset 'ppo-clip' has no constants 'appendix-d'"),
        (["--objective", "ppo-clip", "--mu", "1"], "plot: --mu 1 must be between 0 and 1"),
        (["a-run", "--objective", "ppo-clip"], "plot: --objective draws presets, not runs (a-run)"),
        ([], "plot: name at least one run"),
    ):
        assert main(["plot", *arguments, "-o", str(picture)]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "mu", "advantage", "change"),
    [
        ("ppo-dual-clip", 0.1, -1, 3.0),
        ("icepop", 0.1, 1, 5.0),
        ("token-mis", 0.1, 1, 2.0),
        ("dppo-binary-tv", 0.5, 1, 1.4),
    ],
)
def test_the_picture_reaches_beyond_the_last_limit(name: str, mu: float, advantage: float, change: float) -> None:
    ratio = np.linspace(0.0, widest_ratio(presets.get(name)), 4001)
    _, kept = objective_and_mask(presets.get(name), mu, advantage, ratio)
    assert not kept[-1]
    assert ratio[kept].max() == pytest.approx(change, abs=5e-3)
    assert (ratio[-1] == 2) == name.startswith("dppo")


@pytest.mark.parametrize(
    ("name", "rare", "likely"), [("ppo-clip", (0.8, 1.2), (0.8, 1.2)), ("dppo-binary-tv", (0, 2), (0.6, 1.4))]
)
def test_where_the_mask_begins(name: str, rare: tuple[float, float], likely: tuple[float, float]) -> None:
    """PPO clips a rare token as a likely one; DPPO, delta 0.2, lets the rare one move (Figure 1)."""
    ratio = np.linspace(0.0, 2.0, 2001)
    for mu, (low, high) in ((0.01, rare), (0.5, likely)):
        value, kept = objective_and_mask(presets.get(name), mu, 1.0, ratio)
        np.testing.assert_allclose(value, ratio, atol=1e-9)
        assert ratio[kept].max() == pytest.approx(high, abs=2e-3)
        value, kept = objective_and_mask(presets.get(name), mu, -1.0, ratio)
        np.testing.assert_allclose(value, -ratio, atol=1e-9)
        assert ratio[kept].min() == pytest.approx(low, abs=2e-3)


def test_curves_over_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Step 3 was not timed, and an evaluation before the first step takes none."""
    rows = [{"step": 0, "eval/accuracy": 0.1}]
    rows += [{"step": s, "reward/mean": s / 10} | ({"time/step_s": 60.0 * s} if s != 3 else {}) for s in (1, 2, 3, 4)]
    rows += [{"step": 4, "eval/accuracy": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    over = History.read(tmp_path).by_time()
    assert over["reward/mean"].steps.tolist() == [1.0, 3.0, 3.0, 7.0]
    assert over["reward/mean"].values.tolist() == [0.1, 0.2, 0.3, 0.4]
    assert over["eval/accuracy"].steps.tolist() == [0.0, 7.0]
    assert over["no/such"].steps.tolist() == []
    assert main(["plot", str(tmp_path), "--time", "-o", str(tmp_path / "time.png")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'time.png'}\n"
    assert ink_per_panel(tmp_path / "time.png")[0] > 0.001


def test_minutes_below_an_axis_stand_apart() -> None:
    each, held_out = Series(np.arange(1, 7), np.full(6, 1.95)), Series(np.array([0, 6]), np.array([0.3, 0.5]))
    steps = History({"time/step_s": each, "reward/accuracy": each, "eval/accuracy": held_out})
    axis = draw_runs({"a": steps}, by_time=True).axes[1]
    axis.figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in axis.get_xticklabels()]
    shown = sorted((box.x0, box.x1) for box in boxes if axis.bbox.x0 <= (box.x0 + box.x1) / 2 <= axis.bbox.x1)
    assert len(shown) > 2
    assert all(left[1] + 5 < right[0] for left, right in pairwise(shown))


def test_two_runs_have_two_colours(tmp_path: Path) -> None:
    plot_runs({"a": history(0), "b": history(1)}, tmp_path / "plot.png")
    pixels = np.asarray(Image.open(tmp_path / "plot.png").convert("RGB")).reshape(-1, 3).tolist()
    colours = {tuple(pixel) for pixel in pixels}
    assert {(31, 119, 180), (255, 127, 14)} <= colours


def test_a_run_is_named_by_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    assert list(_labelled([Path("metrics.jsonl")])) == [tmp_path.name]


def test_plot_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least one run"):
        plot_runs({}, tmp_path / "plot.png")
    with pytest.raises(UserError, match="--time is for curves and --masked"):
        _plot(_parse(["plot", "--time", "--mismatch", str(tmp_path)]))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/plot\.png: cannot write the plot"):
        plot_runs({"a": history()}, tmp_path / "file" / "plot.png")


def test_smoothing_is_the_papers_gaussian_filter() -> None:
    values = np.random.default_rng(0).random(60)
    series = Series(np.arange(60), values)
    interior = slice(8, -8)  # at the ends scipy mirrors the curve, here the kernel is renormalised
    np.testing.assert_allclose(smooth(series)[interior], gaussian_filter1d(values, 2.0)[interior], atol=1e-12)
    np.testing.assert_allclose(smooth(Series(np.arange(5), np.full(5, 3.0))), 3.0)


def test_smoothing_bridges_steps_that_were_not_finite() -> None:
    values = np.where(np.arange(20) == 7, np.nan, 2.0)
    np.testing.assert_allclose(smooth(Series(np.arange(20), values)), 2.0)
    assert np.isnan(smooth(Series(np.arange(3), np.full(3, np.nan)))).all()


def test_the_table_says_what_was_gained_and_where_it_is(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=80)
    path = tmp_path / ("long" * 30) / "metrics.jsonl"
    logged = history()
    logged.series["time/hand_over_s"] = Series(np.array([1, 2]), np.array([6.0, 1.0]))
    print_summary(logged, title="tiny", took=Took(341.0, 95.0), paths={"metrics": path}, console=console)
    text = console.file.getvalue()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    assert ["held-out accuracy", "0.250", "0.750", "+0.500"] in rows
    assert ["held-out answers well-formed", "0.950", "1.000", "+0.050"] in rows
    assert ["steps", "", "30", ""] in rows
    assert ["max |log pi - log mu| (nats)", "5.0e-06", "2.5e-01"] in rows
    assert ["tokens routed differently", "0", "17"] in rows
    assert rows[-7:-1] == [
        ["time (min:s)", "", "5:41", ""],
        ["of it start", "", "1:35", ""],
        ["of it rollout", "", "1:00", ""],
        ["of it hand_over", "", "0:07", ""],
        ["of it eval", "", "0:40", ""],
        ["of it other", "", "2:19", ""],
    ]
    assert ["tokens/s (median step)", "", "2,300", ""] in rows
    assert text.splitlines()[-1] == f"metrics  {path}"


@pytest.mark.parametrize(
    ("since", "evaluated", "rollout", "evaluation", "other"),
    [(21, False, 20, 5, 25), (11, False, 40, 5, 5), (11, True, 40, 20, 30)],
)
def test_the_time_of_a_resumed_run_is_that_of_its_own_steps(since, evaluated, rollout, evaluation, other) -> None:
    """And of the evaluation before them, where it makes up for one that the stop cut off."""
    shown, took = io.StringIO(), Took(50.0 + rollout + evaluation + other, 50.0, since, evaluated)
    print_summary(history(), title="tiny", took=took, paths={}, console=Console(file=shown, width=80))
    for part, seconds in {"start": 50, "rollout": rollout, "eval": evaluation, "other": other}.items():
        assert re.search(rf"of it {part} *│ *│ *0:{seconds:02}", shown.getvalue()), shown.getvalue()


def test_a_run_without_the_parity_check_has_no_table_of_it() -> None:
    assert parity_table(History({"reward/mean": Series(np.array([1]), np.array([0.5]))})) is None
