"""A page about one or several runs: one HTML file that needs nothing but a browser.

Curves, mismatch, phases of a step, answers, the tokens that the trust region blocked most, and what differs between the
runs' configurations: all from the files that a run writes into its folder.
"""

from __future__ import annotations

import html
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_dppo.config.load import read_tree
from megatron_dppo.errors import UserError, of_file
from megatron_dppo.trainer.history import History, as_written, read_rows
from megatron_dppo.trainer.mismatch import MISMATCH_FILE, Mismatch
from megatron_dppo.trainer.plots import Panel, panels_for, smooth
from megatron_dppo.trainer.resume import flatten

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f")
GREEN, RED = "44,160,44", "214,39,40"
_PHASES = ("rollout", "hand_over", "train", "sync")
_DOTS = 3000
"""Tokens of a run that the picture of the mismatch shows."""
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 76em; padding: 0 1em; color: #222 }
h2 { margin-top: 2em; border-bottom: 1px solid #ccc } table { border-collapse: collapse }
td, th { border: 1px solid #ddd; padding: .2em .6em; text-align: left; vertical-align: top }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; font-size: 13px }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(34em, 1fr)); gap: 1em }
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

    Errors: `UserError` where plotly is not installed, a folder holds no run, or the file cannot be written.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UserError("report: plotly is not installed; `uv pip install megatron-dppo[report]`") from None
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
    write_page(path, title or ", ".join(runs), body, script=get_plotlyjs())


def write_page(path: Path, title: str, body: str, *, style: str = STYLE, script: str = "") -> None:
    """Write a page that needs nothing else. Raises UserError where that cannot be."""
    heading = html.escape(title)
    head = f"<style>{style}</style>\n" + (f"<script>{script}</script>" if script else "")
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{heading}</title>\n'
        f"{head}</head>\n<body><h1>{heading}</h1>\n{body}\n</body></html>\n"
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise of_file(error, f"{path}: cannot write the page: {error.strerror or error}") from error


def _curves(runs: Mapping[str, History]) -> str:
    panels = panels_for(runs)
    logged = [p for p in panels if any(len(h[p.metric]) or len(h[p.held_out]) for h in runs.values())]
    return f'<div class="grid">{"".join(_html(_curve(panel, runs)) for panel in logged)}</div>'


def _curve(panel: Panel, runs: Mapping[str, History]) -> Figure:
    """A metric of all runs: as measured, smoothed as in `plot_runs`, and on held-out prompts."""
    from plotly.graph_objects import Figure, Scatter

    figure = Figure()
    for number, (label, history) in enumerate(runs.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        curve, held_out = history[panel.metric], history[panel.held_out]
        if len(curve):
            pale = {"color": colour, "width": 1}
            raw = {"name": f"{label}, each step", "opacity": 0.35, "line": pale, "showlegend": False}
            figure.add_trace(Scatter(x=curve.steps.tolist(), y=_json(curve.values), **raw))
            strong = {"color": colour, "width": 2.5}
            figure.add_trace(Scatter(x=curve.steps.tolist(), y=_json(smooth(curve)), name=label, line=strong))
        if len(held_out):
            dashed = {"color": colour, "dash": "dash"}
            figure.add_trace(
                Scatter(x=held_out.steps.tolist(), y=_json(held_out.values), name=f"{label}, held-out", line=dashed,
                        mode="lines+markers")
            )  # fmt: skip
    figure.update_layout(title=_plain(panel.title), xaxis_title="training step", yaxis_title=_plain(panel.unit))
    if panel.fraction:
        figure.update_yaxes(tickformat=".1%")
    return figure


def _mismatch(runs: Mapping[str, Path]) -> str:
    """Figure 2: |pi - mu| of tokens against mu."""
    from plotly.graph_objects import Figure, Scattergl

    figure = Figure()
    for label, folder in runs.items():
        if not (folder / MISMATCH_FILE).is_file():
            continue
        tokens = Mismatch.read(folder)
        some = np.linspace(0, len(tokens.log_mu) - 1, min(_DOTS, len(tokens.log_mu))).astype(int)
        mu, pi = np.exp(tokens.log_mu[some].astype(np.float64)), np.exp(tokens.log_pi[some].astype(np.float64))
        dots = {"mode": "markers", "name": label, "marker": {"size": 3, "opacity": 0.5}}
        figure.add_trace(Scattergl(x=_json(mu), y=_json(np.maximum(np.abs(pi - mu), 1e-12)), **dots))
    if not figure.data:
        return _nothing("no run has one (trainer.parity_check)")
    figure.update_layout(xaxis_title="mu, the engine's probability of the token", yaxis_title="|pi - mu|")
    figure.update_xaxes(type="log")
    figure.update_yaxes(type="log")
    return _html(figure)


def _phases(runs: Mapping[str, History]) -> str:
    """Seconds of the phases of every step, of each run in turn."""
    from plotly.graph_objects import Bar, Figure

    pictures = []
    for label, history in runs.items():
        figure = Figure()
        for phase in _PHASES:
            series = history[f"time/{phase}_s"]
            figure.add_trace(Bar(x=series.steps.tolist(), y=_json(series.values), name=phase))
        figure.update_layout(barmode="stack", title=html.escape(label), xaxis_title="step", yaxis_title="seconds")
        pictures.append(_html(figure))
    return f'<div class="grid">{"".join(pictures)}</div>'


def _answers(runs: Mapping[str, Path]) -> str:
    """Answers of the last step that has some, each token on the colour of its answer's advantage; what the trust region
    blocked is struck out, and what was not trained on is grey."""
    parts = []
    for label, folder in runs.items():
        rows = list(_rows(folder, "samples.jsonl"))
        last = [row for row in rows if row["step"] == rows[-1]["step"]] if rows else []
        if not last:
            parts.append(f"<h3>{html.escape(label)}</h3>{_nothing('no answers were kept (tracking.samples_every)')}")
            continue
        with as_written(folder / "samples.jsonl"):
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
        with as_written(folder / "masked_tokens.jsonl"):
            for row in _rows(folder, "masked_tokens.jsonl"):
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
        label: {name: json.dumps(value) for name, value in flatten(read_tree(folder / "config.yaml")).items()}
        for label, folder in runs.items()
        if (folder / "config.yaml").is_file()
    }
    if not settings:
        return _nothing("no run has its config.yaml")
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


def _html(figure: Figure) -> str:
    figure.update_layout(template="plotly_white", height=380, margin={"l": 60, "r": 20, "t": 50, "b": 50})
    return str(figure.to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False}))


def _json(values: Sequence[float] | np.ndarray) -> list[float | None]:
    """Plain numbers: readable in the page, and None where there is none."""
    return [float(value) if np.isfinite(value) else None for value in values]


def _plain(text: str) -> str:
    """A panel's title without matplotlib's mathematics."""
    for old, new in (("$", ""), (r"\pi", "π"), (r"\mu", "μ"), (r"\log", "log")):
        text = text.replace(old, new)
    return html.escape(text)


def _nothing(why: str) -> str:
    return f'<p class="none">{html.escape(why)}</p>'
