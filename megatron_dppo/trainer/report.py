"""A page about one or several runs: one HTML file that needs nothing but a browser.

Curves, mismatch, phases of a step, answers, the tokens that the trust region blocked most, and what differs between the
runs' configurations: all from the files that a run writes into its folder.
"""

from __future__ import annotations

import base64
import html
import io
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from megatron_dppo.config.load import read_tree
from megatron_dppo.errors import file_errors
from megatron_dppo.trainer.history import CONFIG_FILE, MASKED_TOKENS_FILE, SAMPLES_FILE, History, as_written, read_rows
from megatron_dppo.trainer.mismatch import MISMATCH_FILE, Mismatch
from megatron_dppo.trainer.mismatch_plot import draw_mismatch
from megatron_dppo.trainer.plots import draw_runs, panels_for, plain
from megatron_dppo.trainer.resume import flatten

GREEN, RED = "44,160,44", "214,39,40"
_PHASES = ("rollout", "hand_over", "train", "sync")
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 76em; padding: 0 1em; color: #222 }
h2 { margin-top: 2em; border-bottom: 1px solid #ccc } table { border-collapse: collapse }
td, th { border: 1px solid #ddd; padding: .2em .6em; text-align: left; vertical-align: top }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; font-size: 13px }
img { width: 100% }
.token { border-radius: 2px; outline: 1px solid #fff8 } .none { color: #888 }
.blocked { text-decoration: line-through 2px } .untrained { color: #999 }
"""

TOKEN_KEY = (
    f'Tokens are <span style="background:rgba({GREEN},.4)">green</span> where the answer\'s advantage is above 0, '
    f'<span style="background:rgba({RED},.4)">red</span> where it is below; those that the trust region '
    '<span class="blocked">blocked</span> are struck out, and those that were '
    '<span class="untrained">not trained on</span> are grey.'
)


def write_report(runs: Mapping[str, Path], path: Path, *, title: str = "") -> None:
    """Write the page of `runs` (label -> folder) to `path`.

    Errors: `UserError` where a folder holds no run, or the file cannot be written.
    """
    histories = {label: History.read(folder) for label, folder in runs.items()}
    sections = [
        ("Curves", _curves(histories)),
        ("Mismatch of trainer and engine before any update", _mismatch(runs)),
        ("Time of a step", _phases(histories)),
        ("Answers", _answers(runs)),
        ("Tokens that the trust region blocked most", _masked(runs)),
        ("Configurations", _configurations(runs)),
    ]
    body = "\n".join(f"<h2>{html.escape(name)}</h2>\n{content}" for name, content in sections)
    write_page(path, title or ", ".join(runs), body)


def write_page(path: Path, title: str, body: str, *, style: str = STYLE) -> None:
    """Write a page that needs nothing else. Raises UserError where that cannot be."""
    heading = html.escape(title)
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{heading}</title>\n'
        f"<style>{style}</style></head>\n<body><h1>{heading}</h1>\n{body}\n</body></html>\n"
    )
    with file_errors(f"{path}: cannot write the page"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8", errors="backslashreplace")


def _curves(runs: Mapping[str, History]) -> str:
    logged = [p for p in panels_for(runs) if any(len(h[p.metric]) or len(h[p.held_out]) for h in runs.values())]
    return _picture(draw_runs(runs, panels=logged)) if logged else _nothing("no run has logged one")


def _mismatch(runs: Mapping[str, Path]) -> str:
    """Figure 2."""
    found = {label: Mismatch.read(folder) for label, folder in runs.items() if (folder / MISMATCH_FILE).is_file()}
    return _picture(draw_mismatch(found)) if found else _nothing("no run has one (trainer.parity_check)")


def _phases(runs: Mapping[str, History]) -> str:
    """Seconds of the phases of every step, of each run in turn."""
    taken = {label: {phase: history[f"time/{phase}_s"] for phase in _PHASES} for label, history in runs.items()}
    taken = {label: phases for label, phases in taken.items() if any(map(len, phases.values()))}
    if not taken:
        return _nothing("no run has logged it")
    figure = Figure(figsize=(13.5, 2.6 * len(taken)), layout="constrained")
    for axis, (label, phases) in zip(figure.subplots(len(taken), squeeze=False)[:, 0], taken.items(), strict=True):
        steps = np.unique(np.concatenate([series.steps for series in phases.values()]))
        edges = np.append(steps, steps[-1:] + 1) - 0.5
        below = np.zeros(len(steps))
        for phase, series in phases.items():
            above = below.copy()
            above[np.searchsorted(steps, series.steps)] += np.nan_to_num(series.values)
            axis.stairs(above, edges, baseline=below, fill=True, label=phase)
            below = above
        axis.set(title=plain(label), xlabel="training step", ylabel="seconds")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper")
    return _picture(figure)


def _answers(runs: Mapping[str, Path]) -> str:
    """Answers of the last step that has some, each token on the colour of its answer's advantage; what the trust region
    blocked is struck out, and what was not trained on is grey."""
    parts = []
    for label, folder in runs.items():
        rows = list(_rows(folder, SAMPLES_FILE))
        last = [row for row in rows if row["step"] == rows[-1]["step"]] if rows else []
        if not last:
            parts.append(f"<h3>{html.escape(label)}</h3>{_nothing('no answers were kept (tracking.samples_every)')}")
            continue
        with as_written(folder / SAMPLES_FILE):
            largest = max((abs(one) for row in last for one in _advantages(row)), default=0.0) or 1.0
            lines = "".join(_answer(row, largest) for row in last)
        parts.append(
            f"<h3>{html.escape(label)}, step {last[0]['step']}</h3><table><tr><th>prompt<th>answer<th>reference"
            f"<th>reward<th>advantage<th>tokens<th>ended by</tr>{lines}</table>"
        )
    return f"<p>{TOKEN_KEY}</p>{''.join(parts)}"


def _answer(row: Mapping[str, Any], largest: float) -> str:
    advantage = row.get("advantage")

    def colour(of: float) -> str:
        return f"rgba({GREEN if of > 0 else RED},{0.5 * min(abs(of) / largest, 1.0):.2f})"

    tokens = "".join(token_spans(row, colour))
    shown = "" if advantage is None else f"{advantage:+.3g}"
    cells = [f"<pre>{html.escape(row['prompt'])}</pre>", f"<pre>{tokens}</pre>", html.escape(str(row["reference"]))]
    cells += [f"{row['reward']:.3g}", shown, str(row["tokens"]), html.escape(row["finish_reason"])]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def token_spans(row: Mapping[str, Any], colour: Callable[[float], str]) -> list[str]:
    """The tokens of an answer in `samples.jsonl`, those that were trained on with the `colour` of their advantage: the
    answer's, or the turn's where each has its own."""
    blocked, untrained = set(row.get("blocked", ())), set(row.get("untrained", ()))
    pieces = row.get("pieces") or [row["response"]]
    return [
        f'<span class="token untrained">{html.escape(piece)}</span>'
        if number in untrained
        else f'<span class="token{" blocked" if number in blocked else ""}" style="background:{colour(advantage)}">'
        f"{html.escape(piece)}</span>"
        for number, (piece, advantage) in enumerate(zip(pieces, _advantages(row), strict=False))
    ]


def _advantages(row: Mapping[str, Any]) -> list[float]:
    """Of every piece of an answer."""
    begins, advantage, found = dict(row.get("turn_advantages") or ()), row.get("advantage") or 0.0, []
    for number in range(len(row.get("pieces") or [row["response"]])):
        advantage = begins.get(number, advantage)
        found.append(float(advantage))
    return found


def _masked(runs: Mapping[str, Path]) -> str:
    parts = []
    for label, folder in runs.items():
        totals: dict[str, dict[str, int]] = {"positive": defaultdict(int), "negative": defaultdict(int)}
        with as_written(folder / MASKED_TOKENS_FILE):
            for row in _rows(folder, MASKED_TOKENS_FILE):
                for sign, counts in totals.items():
                    for text, count in row.get(sign, ()):
                        counts[text] += int(count)
        lines = []
        for sign, counts in totals.items():
            most = sorted(counts.items(), key=lambda pair: -pair[1])[:50]
            shown = ", ".join(f"<code>{html.escape(repr(text))}</code> {count}" for text, count in most)
            lines.append(f"<tr><th>A {'&gt;' if sign == 'positive' else '&lt;'} 0<td>{shown or 'none'}</tr>")
        parts.append(f"<h3>{html.escape(label)}</h3><table>{''.join(lines)}</table>")
    return "".join(parts)


def _configurations(runs: Mapping[str, Path]) -> str:
    """Of one run every setting that its file states; of several those in which they differ."""
    settings = {
        label: {name: json.dumps(value) for name, value in flatten(read_tree(folder / CONFIG_FILE)).items()}
        for label, folder in runs.items()
        if (folder / CONFIG_FILE).is_file()
    }
    if not settings:
        return _nothing(f"no run has its {CONFIG_FILE}")
    names = dict.fromkeys(name for one in settings.values() for name in one)
    several = len(settings) > 1
    differ = [name for name in names if not several or len({one.get(name) for one in settings.values()}) > 1]
    head = "".join(f"<th>{html.escape(label)}" for label in settings)
    lines = "".join(
        f"<tr><td>{html.escape(name)}"
        + "".join(f"<td>{html.escape(one.get(name, 'absent'))}" for one in settings.values())
        + "</tr>"
        for name in differ
    )
    said = f"<p>{len(differ)} of {len(names)} settings differ.</p>" if several else ""
    return f"{said}<table><tr><th>setting{head}</tr>{lines}</table>"


def _rows(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    return read_rows(folder / name) if (folder / name).is_file() else iter(())


def _picture(figure: Figure) -> str:
    """In the page itself, sharp however far one zooms in."""
    written = io.BytesIO()
    figure.savefig(written, format="svg")
    return f'<img alt="" src="data:image/svg+xml;base64,{base64.b64encode(written.getvalue()).decode()}">'


def _nothing(why: str) -> str:
    return f'<p class="none">{html.escape(why)}</p>'
