"""Which runs the study of SmolLM2 has."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dppo.errors import UserError

ALGORITHMS = ("dppo-binary-tv", "grpo-clip-higher", "cispo", "pg-is")
EXPERIMENTS = ("learn", "replay", "rates", "staleness", "noise")
SHORT = (
    *("trainer.steps=25", "trainer.checkpoint_every=0", "evaluation.every=0"),
    *("trainer.export_hugging_face=false", "tracking.samples_every=0", "trainer.parity_check=false"),
    *("rollout.enforce_eager=true", "rollout.object_store_mib=128", "actor.max_tokens_per_microbatch=8192"),
)
"""Of the runs of a table: 512 answers and 4 gradient steps a step, 100 gradient steps in all. Compiling and capturing
CUDA graphs would take longer than these answers do; one microbatch a gradient step has half the launches of two."""
MIXTURE_GIB, DENSE_GIB = 29, 14
"""Of GPU memory that a run takes, trainer and engine."""


@dataclass(frozen=True)
class Job:
    """One run: its folder below OUT, overrides, the GPU memory that it takes, and what it trains: the dense model, one
    of `experts` copies of each MLP, or what is in the folder `model`."""

    folder: str
    seed: int
    overrides: tuple[str, ...]
    gib: int
    experts: int = 0
    model: Path | None = None


def jobs(chosen: argparse.Namespace) -> list[Job]:
    """All runs of the command line, in order. Raises UserError where an option is missing."""
    return [job for name in chosen.experiments for seed in chosen.seeds for job in of_experiment(name, seed, chosen)]


def of_experiment(experiment: str, seed: int, chosen: argparse.Namespace) -> Iterator[Job]:
    """Those of one with one seed."""

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
                precise = (
                    *("actor.dtype=float32", "rollout.dtype=float32", "rollout.weight_transfer=object_store"),
                    "rollout.object_store_mib=640",  # two buckets of weights, and the answers
                )
                for noise in chosen.noise:
                    noisy = f"trainer.engine_weight_noise={noise:g}"
                    yield job(f"{algorithm}/{noise:g}", *one, rate, *precise, noisy, gib=2 * DENSE_GIB)
