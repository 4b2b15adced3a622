"""Fits the planner's efficiencies to measured steps.

    python tools/bench_actor_step.py --out OUT --only a1 a1-small a1-short a1-long
    python tools/fit_planner.py OUT/bench.json --gpu h200-141g --save fit.json

Every fitted efficiency moves from the GPU's present value x0 by as little as explains the steps: minimised is the sum
of (ln(predicted / measured) / 0.03)^2 over cases and (ln(x / x0) / 0.35)^2 over efficiencies. Those measured apart (the
head, the optimizer) stay. `--save` writes all of them for `tools/compare_plan.py --efficiency`.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

sys.path.insert(0, str(Path(__file__).parent))

from actor_step.cases import CASES, Case
from compare_plan import Measured, measured, plan, read_bench, save

from megatron_dppo.errors import UserError
from megatron_dppo.launch import exit_status
from megatron_dppo.planner.gpus import GPUS, Efficiency, Gpu, efficiency_of, find_gpu
from megatron_dppo.planner.step_time import step_time

FITTED = (
    *("grouped", "memory", "link"),
    *("expert_forward_s", "expert_backward_s", "layer_forward_s", "layer_backward_s", "microbatch_s"),
)
SPREAD, PRIOR = 0.03, 0.35
"""Standard deviations of ln: of a measured step, of an efficiency about its present value."""


def fit(steps: dict[str, float], gpu: Gpu) -> Efficiency:
    """The efficiencies of `gpu` from seconds of a step, by the name of the case."""
    start = efficiency_of(gpu.name)
    cases = [(plan(case, gpu), case.microbatches, steps[case.name]) for case in CASES if case.name in steps]
    origin = np.log([getattr(start, name) for name in FITTED])

    def residuals(x: np.ndarray) -> np.ndarray:
        e = _with(start, x)
        off = [math.log(step_time(layout, count, e).total / seen) / SPREAD for layout, count, seen in cases]
        return np.concatenate([off, (x - origin) / PRIOR])

    # The model has kinks where the host overtakes the GPU: steps of the differences must be larger than rounding.
    return _with(start, least_squares(residuals, origin, diff_step=1e-3, max_nfev=500).x)


def predicted(case: Case, gpu: Gpu, e: Efficiency) -> float:
    """Seconds of a step."""
    return step_time(plan(case, gpu), case.microbatches, e).total


def _with(start: Efficiency, x: np.ndarray) -> Efficiency:
    return dataclasses.replace(start, **dict(zip(FITTED, map(float, np.exp(x)), strict=True)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("bench", type=Path, nargs="+", help="bench.json of tools/bench_actor_step.py")
    parser.add_argument("--gpu", default="h100-80g", choices=GPUS)
    parser.add_argument(
        "--only", nargs="+", choices=[case.name for case in CASES], metavar="CASE", help="fit to these alone"
    )
    parser.add_argument("--save", type=Path, help="write the efficiencies there")
    arguments = parser.parse_args()
    return exit_status(lambda: fit_files(arguments))


def fit_files(arguments: argparse.Namespace) -> None:
    """The efficiencies and what they foretell on standard output."""
    gpu = find_gpu(arguments.gpu)
    found: dict[str, Measured] = {}
    known = [case.name for case in CASES]
    for file in arguments.bench:
        found |= read_bench(file, arguments.only or known)["cases"]
    names = arguments.only or found
    steps = {name: step for name in names if (step := measured({"cases": found}, name)[1])}
    if not steps.keys() & set(known):
        files = " ".join(map(str, arguments.bench))
        raise UserError(f"bench: {files}: no step of {' '.join(names) or 'any case'} was measured; measure one")
    before, after = efficiency_of(gpu.name), fit(steps, gpu)
    for name in FITTED:
        print(f"{name:18} {getattr(before, name):.3g} -> {getattr(after, name):.3g}")
    for case in [case for case in CASES if case.name in steps]:
        seen = steps[case.name]
        was, now = (predicted(case, gpu, e) / seen - 1 for e in (before, after))
        print(f"{case.name:10} measured {seen:.3f} s, before {was:+.1%}, now {now:+.1%}")
    if arguments.save:
        save(arguments.save, dataclasses.asdict(after))


if __name__ == "__main__":
    sys.exit(main())
