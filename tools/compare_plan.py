"""Predictions of the planner for measured layouts, and measured numbers beside them.

    python tools/compare_plan.py                                  # predictions alone
    python tools/compare_plan.py bench.json                       # beside what tools/bench_actor_step.py wrote
    python tools/compare_plan.py bench.json --fixed predictions.json
    python tools/compare_plan.py --save predictions.json          # keep them, before measuring
    python tools/compare_plan.py --gpu h200-141g --only p1 p2     # other cases, on another GPU
    python tools/compare_plan.py --efficiency fit.json            # as fitted by tools/fit_planner.py

Markdown on standard output. With `--fixed` the predictions are those of the file and not today's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import pydantic
from pydantic import ConfigDict, TypeAdapter, ValidationError

sys.path.insert(0, str(Path(__file__).parent))

from actor_step.cases import CASES as MEASURED
from actor_step.cases import Case

from megatron_dppo.errors import UserError, listed
from megatron_dppo.json_object import read_json_object
from megatron_dppo.launch import exit_status
from megatron_dppo.models.hf_config import resolve_hf_config
from megatron_dppo.models.lora.config import LoraConfig
from megatron_dppo.models.parallel import ParallelConfig
from megatron_dppo.planner.gpus import GIB, GPUS, Efficiency, Gpu, find_gpu
from megatron_dppo.planner.memory import stage_memory
from megatron_dppo.planner.report import layout_name, memory_parts
from megatron_dppo.planner.step_time import step_time
from megatron_dppo.planner.workload import Layout


class Measured(TypedDict, total=False):
    """Of a case, what tools/bench_actor_step.py wrote."""

    peak_gib: float | None
    with_replay: dict[str, list[float]]
    """Seconds of a step, by arm."""


class Bench(TypedDict):
    """bench.json, as far as it is read."""

    cases: dict[str, Measured]


class Prediction(TypedDict):
    """Of a case, as far as a table shows it."""

    layout: str
    layers: int
    gpus: int
    pack: NotRequired[int]
    recompute: str
    microbatches: int
    peak_gib: float
    parts_gib: dict[str, float]
    step_s: float


def read[T](file: Path, kind: type[T], *, option: str, writer: str) -> T:
    """What a JSON file holds. `UserError` names the argument, the file and what is wrong with it."""
    try:
        return TypeAdapter(kind).validate_python(read_json_object(file))
    except (UserError, ValidationError) as error:
        problem = f"{file}: {first_problem(error)}" if isinstance(error, ValidationError) else str(error)
        raise UserError(f"{option}: {problem}; give a file that {writer} wrote") from None


def read_bench(file: Path, names: Sequence[str]) -> Bench:
    """The same of bench.json, in which one of the cases `names` was measured at least."""
    bench = read(file, Bench, option="bench", writer="tools/bench_actor_step.py")
    if all(measured(bench, name) == (None, None) for name in names):
        raise UserError(
            f"bench: {file}: no peak and no step of {listed(names, 8, between=' ')} in it; give a file that "
            "tools/bench_actor_step.py wrote of a case"
        )
    return bench


def first_problem(error: ValidationError) -> str:
    found = error.errors()[0]
    return f"{'.'.join(map(str, found['loc']))}: {found['msg']}"


def save(file: Path, what: object) -> None:
    """As JSON."""
    try:
        file.write_text(json.dumps(what, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"--save: {file} cannot be written: {error.strerror}; name another file") from None


FIRST = ("a1", "b2", "c2", "d2", "e4", "f4", "g4")
"""Those of tools/bench_actor_step.py that were predicted before they were measured on H100s."""


def plan(case: Case, gpu: Gpu, lora: LoraConfig | None = None) -> Layout:
    """The case as the planner sees it, trained whole or by adapters."""
    return Layout(
        model=resolve_hf_config(case.config),
        gpu=gpu,
        gpus=case.gpus,
        parallel=ParallelConfig(**case.layout),
        recompute=case.recompute,
        recompute_layers=case.recompute_layers,
        microbatch_tokens=case.sizes.pack,
        attention_span=case.length,
        lora=lora,
    )


def predict(
    case: Case, gpu: Gpu, efficiency: Efficiency | None = None, lora: LoraConfig | None = None
) -> dict[str, Any]:
    """`peak_gib` of the fullest rank, its parts, and `step_s` of one gradient step."""
    layout = plan(case, gpu, lora)
    stages = [stage_memory(layout, stage, case.microbatches) for stage in range(layout.parallel.pipeline)]
    fullest = max(stages, key=lambda stage: stage.peak)
    time = step_time(layout, case.microbatches, efficiency)
    return {
        "layout": f"{layout_name(layout.parallel)}, DP{layout.data}",
        "gpu": gpu.name,
        "layers": case.layers,
        "gpus": case.gpus,
        "pack": case.sizes.pack,
        "recompute": case.recompute,
        "microbatches": case.microbatches,
        "parameters_per_rank": fullest.parameters.total,
        "peak_gib": fullest.peak / GIB,
        "parts_gib": {name: size / GIB for name, size in memory_parts(fullest).items()},
        "step_s": time.total,
        "parts_s": dict(vars(time)),
    }


def measured(bench: Bench, name: str) -> tuple[float | None, float | None]:
    """(peak GiB, median seconds of a step with replay and top-K) of a case, None where it was not measured."""
    found = bench["cases"].get(name, {})
    steps = found.get("with_replay", {})
    arm = next((arm for arm in ("dppo-topk-tv, replay", *steps) if steps.get(arm)), None)
    return found.get("peak_gib"), statistics.median(steps[arm]) if arm else None


def table(predictions: dict[str, Any], bench: Bench | None) -> str:
    head = [
        "case",
        "GPUs",
        "layout",
        "layers",
        "recompute",
        "tokens of a pack",
        "micro-batches",
        "weights",
        "gradients",
        "optimizer",
    ]
    head += ["activations", "workspace", "peak, GiB", "step, s"]
    if bench is not None:
        head += ["measured peak", "off by", "measured step", "off by"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, guess in predictions.items():
        parts = guess["parts_gib"]
        cells = [name, guess["gpus"], guess["layout"], guess["layers"], guess["recompute"]]
        cells += [guess.get("pack", 16384), guess["microbatches"]]
        cells += [f"{parts[part]:.2f}" for part in ("weights", "gradients", "optimizer", "activations")]
        cells += [f"{parts['workspace'] + parts['library workspaces']:.2f}"]
        cells += [f"**{guess['peak_gib']:.1f}**", f"**{guess['step_s']:.3f}**"]
        if bench is not None:
            peak, step = measured(bench, name)
            cells += [*_beside(peak, guess["peak_gib"], 1), *_beside(step, guess["step_s"], 3)]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def _beside(seen: float | None, guess: float, digits: int) -> list[str]:
    return ["-", "-"] if seen is None else [f"{seen:.{digits}f}", f"{guess / seen - 1:+.1%}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("bench", type=Path, nargs="?", help="bench.json of tools/bench_actor_step.py")
    parser.add_argument("--fixed", type=Path, help="predictions saved earlier")
    parser.add_argument("--save", type=Path, help="write today's predictions there")
    parser.add_argument("--gpu", default="h100-80g", choices=GPUS)
    parser.add_argument(
        "--only",
        nargs="*",
        choices=[case.name for case in MEASURED],
        metavar="CASE",
        default=FIRST,
        help="cases of tools/bench_actor_step.py",
    )
    parser.add_argument("--efficiency", type=Path, help="what tools/fit_planner.py wrote")
    arguments = parser.parse_args()
    return exit_status(lambda: compare(arguments))


def compare(arguments: argparse.Namespace) -> None:
    """The table on standard output."""
    efficiency = None
    if arguments.efficiency:
        fields: dict[str, Any] = {field.name: float for field in dataclasses.fields(Efficiency)}  # none is left out
        kind = pydantic.create_model("Fit", __config__=ConfigDict(extra="forbid"), **fields)
        fit = read(arguments.efficiency, kind, option="--efficiency", writer="tools/fit_planner.py --save")
        efficiency = Efficiency(**fit.model_dump())
    if arguments.fixed:
        predictions = read(arguments.fixed, dict[str, Prediction], option="--fixed", writer="this tool with --save")
        if not predictions:
            raise UserError(f"--fixed: {arguments.fixed}: no case in it; give a file that this tool with --save wrote")
    else:
        cases = {case.name: case for case in MEASURED}
        gpu = find_gpu(arguments.gpu)
        predictions = {name: predict(cases[name], gpu, efficiency) for name in arguments.only}
    bench = read_bench(arguments.bench, list(predictions)) if arguments.bench else None
    if arguments.save:
        save(arguments.save, predictions)
    print(table(predictions, bench))


if __name__ == "__main__":
    sys.exit(main())
