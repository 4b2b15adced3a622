"""What the scripts of the paper's experiments do: choose a configuration, and train with it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megatron_dppo.errors import UserError
from megatron_dppo.launch.example import Downloaded, MadeOnce, job_stamp, run_example
from megatron_dppo.launch.nodes import ranks_in_all_and_here
from megatron_dppo.launch.rank import exit_status

_TRIAL = (
    "model.random_weights=true",
    "task.kind=reasoning-gym",  # the experiment's questions are a download too
    "task.dataset=chain_sum",
    "task.data=null",
    "task.rewards=[]",
    "evaluation.every=0",
    "evaluation.sets=[]",
    "rollout.max_response_tokens=1024",
    "rollout.tensor_parallel=1",
    "trainer.steps=5",
    "trainer.prompts_per_step=32",
    "trainer.samples_per_prompt=8",
    "trainer.prompts_per_mini_batch=16",
    "trainer.checkpoint_every=0",
    "trainer.export_hugging_face=false",
)
"""What `--random-weights` sets, before the command line's own overrides."""


def run_experiment(
    main: Callable[[Sequence[str]], int], models: Mapping[str, str], *, script: str, shapes: Mapping[str, str] = {}
) -> None:
    """Run `examples/paper/EXPERIMENT.yaml` on all ranks and exit, see `run_example`.

    models  experiments of `script`, each with the hub's name of its model; the first is the default
    shapes  for `--random-weights`: the tool that writes the model's folder without weights, by the model's name

    The variables EXPERIMENT, MODEL_DIR, RUN_DIR, SEED, NPROC and the options are described at the top of the scripts.
    """
    from torch.cuda import device_count

    root = Path(script).resolve().parent.parent
    experiment = os.environ.get("EXPERIMENT", next(iter(models)))
    if experiment not in models:
        raise SystemExit(exit_status(lambda: _refuse(f"EXPERIMENT={experiment} is none of {', '.join(models)}")))
    name = models[experiment].rsplit("/", 1)[-1]
    trial, overrides = _options(sys.argv[1:])
    ranks, here = ranks_in_all_and_here()
    if "RUN_DIR" not in os.environ and here < ranks:
        why = "RUN_DIR is not set, and by default each node would have a folder of its own; name one that all see"
        raise SystemExit(exit_status(lambda: _refuse(why)))
    run = Path(os.environ.get("RUN_DIR", root / f"runs/{experiment}/{job_stamp()}"))
    seed = os.environ.get("SEED", "0")
    model: Downloaded | MadeOnce
    settings: list[str] = []
    if trial.random_weights:
        if models[experiment] not in shapes:
            raise SystemExit(exit_status(lambda: _refuse(f"--random-weights: no shapes of {name} here")))
        size = [] if trial.layers is None else ["--layers", str(trial.layers)]
        suffix = "" if trial.layers is None else f"-{trial.layers}-layers"
        folder = Path(os.environ.get("MODEL_DIR", root / "models" / f"{name}-shapes{suffix}"))
        model = MadeOnce(folder, [str(root / shapes[models[experiment]]), "{out}", *size])
        settings = [*_TRIAL, *_parallel(ranks)]
    elif trial.layers is not None:
        raise SystemExit(exit_status(lambda: _refuse("--layers goes with --random-weights: a checkpoint has its own")))
    else:
        folder = Path(os.environ.get("MODEL_DIR", root / "models" / name))
        model = Downloaded(folder, models[experiment])
    config = root / "examples/paper" / f"{experiment}.yaml"
    run_example(
        main,
        ["train", str(config), f"model.path={folder}", f"run.dir={run}", f"run.seed={seed}", *settings],
        script=script,
        processes=os.environ.get("NPROC") or str(device_count() or 8),
        model=model,
        settings={"EXPERIMENT": experiment, "SEED": seed, "MODEL_DIR": folder, "RUN_DIR": run},
        overrides=overrides,
    )


def _options(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our options, and the overrides among them, in order."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--layers", type=int)
    return parser.parse_known_args(arguments)


def _parallel(ranks: int) -> list[str]:
    """Sizes for a trial on any number of GPUs; the experiment's own are for 32."""
    tensor = next(size for size in (4, 2, 1) if ranks % size == 0)
    expert = next(size for size in (8, 4, 2, 1) if ranks % size == 0)
    return [
        f"parallel.tensor={tensor}",
        f"parallel.expert={expert}",
        f"parallel.sequence_parallel={'true' if tensor > 1 else 'false'}",
    ]


def _refuse(why: str) -> int:
    raise UserError(why)
