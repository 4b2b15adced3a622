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

Runs are OUT/EXPERIMENT/ARM/seed-N, seed by seed, each made by one of the lanes: processes that keep their engine from run
to run (`lane.py`). Where there are several GPUs start this once for each (CUDA_VISIBLE_DEVICES) with the same OUT: no run
is made twice. One that is complete is not repeated; one that stopped with a state goes on from it, without one it begins
anew. After `--seconds` nothing is started; what runs is asked to stop.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.smollm2.lane import Job, run_lane
from examples.smollm2.report import report
from megatron_dppo.checkpoint.state_folder import finished_states
from megatron_dppo.errors import UserError
from megatron_dppo.launch import exit_status
from megatron_dppo.trainer.history import CHECKPOINTS, METRICS_FILE, read_rows

ALGORITHMS = ("dppo-binary-tv", "grpo-clip-higher", "cispo", "pg-is")
EXPERIMENTS = ("learn", "replay", "rates", "staleness", "noise")
SHORT = (
    *("trainer.steps=25", "trainer.checkpoint_every=0", "evaluation.every=0"),
    *("trainer.export_hugging_face=false", "tracking.samples_every=0", "trainer.parity_check=false"),
)
"""Of the runs of a table: 512 answers and 4 gradient steps a step, 100 gradient steps in all."""
LOST = 2
"""How often a lane that was killed starts again."""
MIXTURE_GIB, DENSE_GIB = 29, 14
"""Of GPU memory that a run takes, trainer and engine."""


def jobs(experiment: str, seed: int, chosen: argparse.Namespace) -> Iterator[Job]:
    """The runs of `experiment` with `seed`. Raises UserError where an option is missing."""

    def job(arm: str, *overrides: str, folder: str = "", gib: int = DENSE_GIB, **options: Any) -> Job:
        folder = f"{folder or f'{experiment}/{arm}'}/seed-{seed}"
        return Job(folder, seed, (f"run.name={arm}", *overrides, *chosen.overrides), gib, **options)

    if experiment == "learn":
        kept = ("trainer.checkpoint_every=0",)  # with its moments a mixture's state is 11 GB
        yield job("dense", *kept)
        yield job("mixture", *kept, gib=MIXTURE_GIB, experts=8)
    elif experiment == "replay":
        if chosen.parted is None:
            raise UserError("study replay: name the mixture whose experts differ (supervised.py makes it): --parted")
        mixture = {"gib": MIXTURE_GIB, "experts": 8, "model": chosen.parted}
        kept = ("trainer.steps=30", "trainer.checkpoint_every=0", "trainer.export_hugging_face=false")
        yield job("r3", *kept, **mixture)
        yield job("live", *kept, "actor.router_replay=none", **mixture)
    else:
        for algorithm in chosen.algorithms:
            one = (*SHORT, f"algorithm.preset={algorithm}", "algorithm.constants=appendix-d")
            rate = f"optimizer.lr={chosen.rate:g}"
            if experiment == "rates":
                for other in chosen.rates:
                    yield job(f"{algorithm}/{other:g}", *one, f"optimizer.lr={other:g}")
            elif experiment == "staleness":
                for steps in chosen.staleness:
                    ahead = ("rollout.schedule=one_step_off", f"rollout.max_staleness={steps}")
                    if steps:
                        yield job(f"{algorithm}/{steps}", *one, rate, *ahead)
                    else:  # the run of `rates`
                        yield job(f"{algorithm}/0", *one, rate, folder=f"rates/{algorithm}/{chosen.rate:g}")
            else:
                precise = ("actor.dtype=float32", "rollout.dtype=float32", "rollout.weight_transfer=object_store")
                for noise in chosen.noise:
                    noisy = f"trainer.engine_weight_noise={noise:g}"
                    yield job(f"{algorithm}/{noise:g}", *one, rate, *precise, noisy, gib=2 * DENSE_GIB)


def left(job: Job, out: Path, steps: int) -> tuple[str, ...] | None:
    """What the run needs beside its overrides to begin or go on; None where it is complete."""
    run = out / job.folder
    if not (run / METRICS_FILE).exists():
        shutil.rmtree(run, ignore_errors=True)
        return ()
    done = max((row["step"] for row in read_rows(run / METRICS_FILE) if "reward/mean" in row), default=0)
    if done >= steps:
        return None
    if finished_states(run / CHECKPOINTS):
        return ("trainer.resume=true",)
    shutil.rmtree(run)
    return ()


def steps_of(job: Job) -> int:
    """Of `trainer.steps` the last word counts; the configuration's is 50."""
    said = [override.partition("=")[2] for override in job.overrides if override.startswith("trainer.steps=")]
    return int(said[-1]) if said else 50


def chosen_jobs(chosen: argparse.Namespace) -> list[Job]:
    return [job for name in chosen.experiments for seed in chosen.seeds for job in jobs(name, seed, chosen)]


def run(chosen: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run what is left in `--lanes` processes, as many of them as `--gib` of the GPU hold; 1 where a run failed."""
    started, queue = time.monotonic(), chosen_jobs(chosen)
    lanes = min(chosen.lanes, len(queue), max(chosen.gib // min(job.gib for job in queue), 1))
    command = [sys.executable, __file__, *arguments, "--until", str(started + chosen.seconds)]
    lost, status = 0, 0
    active: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for number in range(lanes):
            active[number] = _start(command, number, chosen.out)
            time.sleep(chosen.stagger)
        while active:
            time.sleep(0.5)
            for number in [number for number, lane in active.items() if lane.poll() is not None]:
                ended = active.pop(number).returncode
                status = status or ended
                if ended not in (0, 1) and lost < LOST * lanes:
                    lost += 1
                    print(f"lane {number} ended with status {ended}: {_log(chosen.out, number)}", flush=True)
                    active[number] = _start(command, number, chosen.out)
    finally:
        for lane in active.values():
            lane.terminate()
        for lane in active.values():
            lane.wait()
    return int(status != 0)


def _start(command: Sequence[str], number: int, out: Path) -> subprocess.Popen[bytes]:
    file = _log(out, number)
    file.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with open(file, "ab") as log:
        return subprocess.Popen([*command, "--lane", str(number)], env=environment, stderr=log)


def _log(out: Path, number: int) -> Path:
    """What a lane's own processes print; a run's output is beside its folder."""
    return out / f"lanes/{os.environ.get('CUDA_VISIBLE_DEVICES', 'all')}-{number}.log"


def run_one_lane(chosen: argparse.Namespace) -> int:
    """What fits on the GPU beside the lanes before this one."""
    fitting = [job for job in chosen_jobs(chosen) if job.gib * (chosen.lane + 1) <= max(chosen.gib, job.gib)]
    return run_lane(fitting, lambda job: left(job, chosen.out, steps_of(job)), chosen.out, chosen.until)


def _several[T](kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Of a word that holds several, such as "0 1 2"."""

    def values(text: str) -> list[T]:
        return [kind(word) for word in text.split()]

    return values


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument(
        "words", nargs="+", metavar="EXPERIMENT", help=f"{', '.join(EXPERIMENTS)}, or report; a.b=c overrides"
    )
    parser.add_argument("--seeds", type=_several(int), default=[0, 1, 2])
    parser.add_argument("--algorithms", type=_several(str), default=ALGORITHMS)
    parser.add_argument("--rates", type=_several(float), default=[1e-5, 2e-5, 4e-5, 8e-5])
    parser.add_argument("--staleness", type=_several(int), default=[0, 4, 8])
    parser.add_argument("--noise", type=_several(float), default=[0.0, 0.01, 0.03])
    parser.add_argument("--rate", type=float, default=2e-5, help="of staleness and noise")
    parser.add_argument("--parted", type=Path, help="of replay: a mixture whose experts differ")
    parser.add_argument("--lanes", type=int, default=8, help="runs that share the GPU and the cores")
    parser.add_argument("--lane", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--gib", type=int, default=125, help="of the GPU, for all of them")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which nothing is started")
    parser.add_argument("--stagger", type=float, default=1.0, help="seconds between two starts")
    chosen = parser.parse_intermixed_args(arguments)

    def go() -> int | None:
        if chosen.words == ["report"]:
            return report(chosen.out)
        chosen.overrides = tuple(word for word in chosen.words if "=" in word)
        chosen.experiments = [word for word in chosen.words if "=" not in word]
        for word in chosen.experiments:
            if word not in EXPERIMENTS:
                raise UserError(f"study: {word} is no experiment: {', '.join(EXPERIMENTS)}")
        if not chosen.experiments:
            raise UserError(f"study: name an experiment: {', '.join(EXPERIMENTS)}; or report")
        return run(chosen, arguments) if chosen.lane is None else run_one_lane(chosen)

    return exit_status(go)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
