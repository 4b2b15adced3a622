"""Which runs the study of SmolLM2 has, and what each of them is told."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples.smollm2.settings import arguments, model
from megatron_dppo.errors import UserError
from megatron_dppo.launch import MadeOnce

if TYPE_CHECKING:
    from megatron_dppo.config.schema import Config

ALGORITHMS = ("dppo-binary-tv", "grpo-clip-higher", "cispo", "pg-is")
EXPERIMENTS = ("learn", "replay", "rates", "staleness", "noise")
SHORT = (
    *("trainer.steps=25", "trainer.checkpoint_every=0", "evaluation.every=0"),
    *("trainer.export_hugging_face=false", "tracking.samples_every=0", "trainer.parity_check=false"),
    *("rollout.enforce_eager=true", "rollout.object_store_mib=128", "actor.max_tokens_per_microbatch=8192"),
)
"""Of the runs of a table: 512 answers and 4 gradient steps a step, 100 gradient steps in all. Compiling and capturing
CUDA graphs would take longer than these answers do; one microbatch a gradient step has half the launches of two."""
NOISY = Path(__file__).resolve().parents[1] / "noisy_engine.py"
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

    @property
    def made(self) -> MadeOnce:
        """The model that is made where `model` names none."""
        return model(self.experts, self.seed, package=os.environ.get("PACKAGE"))

    def configuration(self, out: Path, *more: str) -> Config:
        """Checked as far as it can be without the model. Errors: `UserError`."""
        from megatron_dppo.config.load import load_config  # takes seconds to import
        from megatron_dppo.preflight.finding import raise_first
        from megatron_dppo.preflight.rules import check_sections

        task, folder = os.environ.get("TASK", "sums"), self.model or self.made.folder
        _, file, *settings = arguments(task, self.experts, self.seed, folder, out / self.folder)
        config = load_config(Path(file), [*settings, *self.overrides, *more])
        raise_first(check_sections(config))
        return config


def jobs(chosen: argparse.Namespace) -> list[Job]:
    """All runs of the command line, in order. Raises UserError where an option is missing or names nothing."""
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
        if said := _no_mixture(chosen.parted):
            raise UserError(
                f"study replay: --parted{said}; make the mixture whose experts differ: examples/smollm2/make_model.py "
                "MIXTURE --experts 8, then examples/smollm2/supervised.py MIXTURE PARTED, and name it: --parted PARTED"
            )
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
                    noisy = (f"rollout.engine={NOISY}:noise_{round(1e6 * noise)}_seed_{seed}",) if noise else ()
                    yield job(f"{algorithm}/{noise:g}", *one, rate, *precise, *noisy, gib=2 * DENSE_GIB)


def _no_mixture(folder: Path | None) -> str:
    """What is wrong with `--parted`; nothing where it is a mixture of experts. UserError for a model that is none."""
    from megatron_dppo.models.hf_config import load_hf_config  # takes seconds to import

    if folder is None:
        return " is missing"
    if not os.path.isfile(folder / "config.json"):
        return f": {folder} holds no model (no config.json)"
    return "" if load_hf_config(folder).moe else f": {folder} is no mixture of experts"
