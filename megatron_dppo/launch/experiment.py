"""What the scripts of the paper's experiments do: choose a configuration, and train with it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megatron_dppo.errors import UserError
from megatron_dppo.launch.example import Downloaded, job_stamp, run_example
from megatron_dppo.launch.rank import exit_status


def run_experiment(main: Callable[[Sequence[str]], int], models: Mapping[str, str], *, script: str) -> None:
    """Run `examples/paper/EXPERIMENT.yaml` on all ranks and exit, see `run_example`.

    models  experiments of `script`, each with the hub's name of its model; the first is the default

    The variables EXPERIMENT, MODEL_DIR, RUN_DIR, SEED and NPROC are described at the top of the scripts.
    """
    root = Path(script).resolve().parent.parent
    experiment = os.environ.get("EXPERIMENT", next(iter(models)))
    if experiment not in models:
        raise SystemExit(exit_status(lambda: _refuse(experiment, models)))
    name = models[experiment].rsplit("/", 1)[-1]
    model = Path(os.environ.get("MODEL_DIR", root / "models" / name))
    run = Path(os.environ.get("RUN_DIR", root / f"runs/{experiment}/{job_stamp()}"))
    seed = os.environ.get("SEED", "0")
    config = root / "examples/paper" / f"{experiment}.yaml"
    run_example(
        main,
        ["train", str(config), f"model.path={model}", f"run.dir={run}", f"run.seed={seed}"],
        script=script,
        processes=os.environ.get("NPROC", "8"),
        model=Downloaded(model, models[experiment]),
        settings={"EXPERIMENT": experiment, "SEED": seed, "MODEL_DIR": model, "RUN_DIR": run},
    )


def _refuse(experiment: str, models: Mapping[str, str]) -> int:
    raise UserError(f"EXPERIMENT={experiment} is none of {', '.join(models)}")
