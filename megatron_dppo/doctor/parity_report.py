"""What `doctor --parity` prints and draws."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import torch
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from megatron_dppo.batch import RolloutBatch
from megatron_dppo.config.schema import Config
from megatron_dppo.doctor.parity import Comparison, Precision, measure, spell
from megatron_dppo.launch.console import CommandConsole
from megatron_dppo.launch.folders import require_writable
from megatron_dppo.preflight.finding import Finding, error
from megatron_dppo.tasks.tokenizer import load_tokenizer
from megatron_dppo.trainer.mismatch_plot import plot_mismatch

FLOAT32_LIMIT = {"cpu": 1e-2, "cuda": 0.2}
"""Nats. Two right float32 forwards of the same experts are 1e-5 to 1e-3 apart on a CPU; what is more is another model.
On a GPU products of float32 are rounded more: 0.044 was the most of 19,366 tokens (docs/benchmarks.md)."""
WORST = 8
"""Different tokens listed per precision."""
STATISTICS = ("mean", "p50", "p99", "max")
PRINTED = ("mean", "p99", "max")
"""Of them, in a table that has to fit a terminal."""


WIDTH = 112
"""Columns of the tables; with fewer their figures would lose exponents."""


def run_parity(config: Config, precisions: list[Precision], *, reference: bool = False) -> Iterator[Finding]:
    """Measure, write `run.dir`/parity.json and parity.png, print two tables; findings where float32 does not agree.

    Only rank 0 prints, writes and finds."""
    folder = config.run.dir
    require_writable(folder, named=f"-o {folder}", make=True)
    found, batches = measure(config, precisions, reference=reference)
    if batches is None:
        return
    numbers = {name: summarise(one) for name, one in found.items()}
    (folder / "parity.json").write_text(json.dumps(numbers, indent=2) + "\n")
    plot_mismatch({name: one.mismatch for name, one in found.items()}, folder / "parity.png")
    console = CommandConsole(highlight=False)  # after the files: nobody may read it
    console.width = max(console.width, WIDTH)
    console.print(_summary(str(config.model.path), numbers))
    console.print(_worst(config, found, batches))
    console.print(f"picture and numbers: {folder}/parity.png, {folder}/parity.json", markup=False, soft_wrap=True)
    for name, passes in numbers.items():
        worst = next(iter(passes.values()))["logp_max"]
        if name == "float32" and not worst <= FLOAT32_LIMIT["cuda" if torch.cuda.is_available() else "cpu"]:
            yield error(
                "parity",
                f"in float32 the trainer is up to {worst:.3g} nats from the engine with the same weights and experts",
                "training on this would optimise another objective; compare the versions of vLLM and transformers "
                "with `megatron-dppo doctor`, and report the model",
            )


def summarise(one: Comparison) -> dict[str, dict[str, float]]:
    """Per pass (R3 on, off, or "-", then the engine and the trainer beside transformers): tokens, and mean, median,
    99th percentile and maximum of |log pi - log mu| in nats (`logp_*`) and of |pi - mu| (`prob_*`)."""
    result: dict[str, dict[str, float]] = {}
    for compared, mine, theirs, routed in one.passes():
        row = {"tokens": float(len(mine))}
        for name, gaps in (("logp", np.abs(mine.astype(np.float64) - theirs)), ("prob", _prob_gaps(mine, theirs))):
            values = (gaps.mean(), *np.quantile(gaps, (0.5, 0.99)), gaps.max())
            row |= {f"{name}_{statistic}": float(value) for statistic, value in zip(STATISTICS, values, strict=True)}
        if routed is not None:
            row["routed_otherwise"] = routed
        result[compared] = row
    return result


def _prob_gaps(mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    return np.abs(np.exp(mine.astype(np.float64)) - np.exp(theirs.astype(np.float64)))


def _summary(model: str, numbers: dict[str, dict[str, dict[str, float]]]) -> Table:
    table = Table(
        title=Text(f"{model}: trainer (pi) against engine (mu), same weights"),
        title_justify="left",
        caption="precision is ENGINE/TRAINER where they differ, transformers' is float32; log-probabilities in nats",
    )
    for header in ("precision", "R3", "tokens", *(f"|log pi - log mu| {s}" for s in PRINTED)):
        table.add_column(header, justify="left" if header in ("precision", "R3") else "right")
    for header in (*(f"|pi - mu| {s}" for s in PRINTED), "routed otherwise"):
        table.add_column(header, justify="right")
    for precision, passes in numbers.items():
        for replay, row in passes.items():
            gaps = [f"{row[f'{name}_{statistic}']:.2e}" for name in ("logp", "prob") for statistic in PRINTED]
            routed = f"{row['routed_otherwise']:,.0f}" if "routed_otherwise" in row else "-"
            table.add_row(precision, replay, f"{row['tokens']:,.0f}", *gaps, routed)
    return table


def _worst(config: Config, found: dict[str, Comparison], batches: dict[str, RolloutBatch]) -> Table:
    """The tokens whose probability differs most, by the pass that the trainer uses (R3 on where there are experts).
    What several answers have alike is one."""
    table = Table(title="largest |pi - mu|", title_justify="left")
    for header in ("precision", "mu", "pi"):
        table.add_column(header, justify="left" if header == "precision" else "right")
    live = any(one.differing_tokens is not None for one in found.values())
    if live:
        table.add_column("pi, R3 off", justify="right")
    for header in ("token", "after"):
        table.add_column(header, overflow="fold")
    tokenizer = load_tokenizer(config.model.path)
    for name, one in found.items():
        order = np.argsort(-_prob_gaps(one.mismatch.log_pi, one.mismatch.log_mu), kind="stable")
        rows: dict[tuple[str, ...], None] = {}
        for i in order:
            before, token = spell(tokenizer, batches[name], int(one.sequence[i]), int(one.position[i]))
            logps = [one.mismatch.log_mu[i], one.mismatch.log_pi[i], *([one.mismatch.log_pi_live[i]] if live else [])]
            rows[name, *(f"{np.exp(float(logp)):.6f}" for logp in logps), _quoted(token), _quoted(before)] = None
            if len(rows) == WORST:
                break
        for row in rows:
            table.add_row(*row)
    return table


def _quoted(text: str) -> str:
    """With visible spaces and line breaks, and no markup."""
    return escape(json.dumps(text, ensure_ascii=False))
