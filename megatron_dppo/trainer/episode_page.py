"""`megatron-dppo show`: one answer or episode of a run as a page that needs nothing but a browser."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from megatron_dppo.errors import UserError
from megatron_dppo.trainer.history import SAMPLES_FILE, as_written, read_rows
from megatron_dppo.trainer.report import GREEN, RED, STYLE, TOKEN_KEY, token_spans, write_page

_OWN_STYLE = """
.turn { border-left: 4px solid #ccc; padding: .3em .8em; margin: .6em 0 } .policy { border-color: #1f77b4 }
.turn h4 { margin: 0; font-weight: 600; color: #666; font-size: 12px }
"""


def show_episode(run: Path, path: Path | None, *, episode: int | None = None, step: int | None = None) -> Path:
    """Write the page of `episode` (its number in its step, by default the first that was kept) of `step` (by default
    the last that kept some); returns where it is. Raises UserError where it was not kept, or cannot be written."""
    file = run / SAMPLES_FILE
    if not file.is_file():
        raise UserError(
            f"{run}: holds no {SAMPLES_FILE}; name the folder of a run, with tracking.samples_every above 0"
        )
    rows = list(read_rows(file))
    steps = sorted({int(row["step"]) for row in rows})
    if not steps:
        raise UserError(f"{file}: no answer was kept yet; wait for a step of tracking.samples_every")
    if step is not None and step not in steps:
        kept = ", ".join(map(str, steps))
        raise UserError(f"{file}: step {step} is not among those that were kept ({kept}); see tracking.samples_every")
    step = steps[-1] if step is None else step
    of_step = [row for row in rows if row["step"] == step]
    with as_written(file):
        numbers = sorted({int(row.get("episode", number)) for number, row in enumerate(of_step)})
    episode = numbers[0] if episode is None else episode
    chosen = [row for number, row in enumerate(of_step) if row.get("episode", number) == episode]
    if not chosen:
        kept = ", ".join(map(str, numbers))
        raise UserError(f"{file}: of step {step} the episodes {kept} were kept, not {episode}; see tracking.samples")
    path = path or Path(f"step-{step}-episode-{episode}.html")
    title = f"{run.resolve().name}: step {step}, episode {episode}"
    with as_written(file):
        body = _body(chosen)
    write_page(path, title, body, style=STYLE + _OWN_STYLE)
    return path


def _body(sequences: Sequence[Mapping[str, Any]]) -> str:
    first = sequences[0]
    said = {
        "reward": f"{first['reward']:.4g}",
        **{f"reward, {name}": f"{value:.4g}" for name, value in first["parts"].items()},
        "advantage": "" if first.get("advantage") is None else f"{first['advantage']:+.4g}",
        "correct": "yes" if first["correct"] else "no",
        "reference": str(first["reference"]),
        "sequences": str(len(sequences)),
    }
    facts = "".join(f"<tr><th>{html.escape(name)}<td>{html.escape(value)}</tr>" for name, value in said.items())
    parts = [f"<table>{facts}</table><p>{TOKEN_KEY}</p>"]
    for number, row in enumerate(sequences):
        branched = "" if number == 0 else ": a branch, which has what is above it in grey as its context"
        ended = f"{row['tokens']} tokens after the prompt, ended by {row['finish_reason']}"
        parts.append(f"<h2>Sequence {number + 1} of {len(sequences)}{branched}</h2><p>{html.escape(ended)}</p>")
        parts.append(
            _turn("before the policy's first word", f'<span class="untrained">{html.escape(row["prompt"])}</span>')
        )
        parts += _turns(row)
    return "".join(parts)


def _turns(row: Mapping[str, Any]) -> list[str]:
    """What the policy wrote, turn by turn, and what it was told in between."""
    spans, untrained = token_spans(row, _colour), set(row.get("untrained", ()))
    begins = dict(row.get("turn_advantages") or ())
    parts, turn = [], 0
    for given, group in groupby(range(len(spans)), key=untrained.__contains__):
        numbers = list(group)
        text = "".join(spans[number] for number in numbers)
        own = f"policy, {turn + 1}"
        if (first := next((n for n in numbers if n in begins), None)) is not None:
            own += f": advantage {begins[first]:+.4g}"
        parts.append(_turn("not trained on" if given else own, text, own=not given))
        turn += not given
    return parts


def _colour(advantage: float) -> str:
    return f"rgba({GREEN if advantage > 0 else RED},.3)" if advantage else "rgba(31,119,180,.15)"


def _turn(name: str, text: str, *, own: bool = False) -> str:
    return f'<div class="turn{" policy" if own else ""}"><h4>{html.escape(name)}</h4><pre>{text}</pre></div>'
