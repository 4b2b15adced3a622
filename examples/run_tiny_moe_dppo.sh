#!/usr/bin/env bash
""":"
# Train a tiny Qwen3-MoE by DPPO on sums, on two CPU cores: Megatron-Core, vLLM and router replay, all real.
#
#   bash examples/run_tiny_moe_dppo.sh [--family NAME] [a.b=c ...]
#   torchrun --nproc-per-node 2 examples/run_tiny_moe_dppo.sh [--family NAME] [a.b=c ...]
#
# --family trains a tiny model of another family: mixtral, olmoe, glm4_moe, glm4_moe_lite, minimax_m2, deepseek_v3, or
# qwen3_next, qwen3_5_moe or gpt_oss with rollout.engine=reference. Each a.b=c overrides a key of
# tiny_moe_dppo/tiny_moe_dppo.yaml. Variables:
#   SEED       of the model and of the run's sampling (default 0); the questions and their order stay those of task.seed
#   FAMILY     the same as --family (default qwen3_moe)
#   MODEL_DIR  folder of the model to train; made when absent (default runs/tiny_moe_model/seed-SEED, or FAMILY-SEED)
#   RUN_DIR    folder of the run: metrics, plots, checkpoints, result (default runs/tiny_moe_dppo/START-TIME)
#   NPROC      ranks, when started by bash (default 2)
#   MAX_RESTARTS  how often lost ranks start again without a new state in between, when started by bash (default 3)
#   PYTHON     interpreter, when started by bash (default .venv/bin/python, made first where there is none)
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

from megatron_dppo.cli import main
from megatron_dppo.launch import MadeOnce, job_stamp, run_example

ROOT = Path(__file__).resolve().parent.parent
SEED = os.environ.get("SEED", "0")
if sys.argv[1:2] == ["--family"] and len(sys.argv) > 2:
    os.environ["FAMILY"] = sys.argv[2]  # for the ranks, which get what follows
    del sys.argv[1:3]
FAMILY = os.environ.get("FAMILY", "qwen3_moe")
NAME = f"seed-{SEED}" if FAMILY == "qwen3_moe" else f"{FAMILY}-{SEED}"
MODEL_DIR = Path(os.environ.get("MODEL_DIR", ROOT / f"runs/tiny_moe_model/{NAME}"))
RUN_DIR = Path(os.environ.get("RUN_DIR", ROOT / f"runs/tiny_moe_dppo/{job_stamp()}"))
CONFIG = ROOT / "examples/tiny_moe_dppo/tiny_moe_dppo.yaml"
MAKE = [f"{ROOT}/examples/tiny_moe_dppo/make_model.py", "{out}", "--seed", SEED, "--family", FAMILY]

if __name__ == "__main__":  # processes that the run spawns import this file again
    run_example(
        main,
        ["train", str(CONFIG), f"model.path={MODEL_DIR}", f"run.dir={RUN_DIR}", f"run.seed={SEED}"],
        script=__file__,
        processes=os.environ.get("NPROC", "2"),
        model=MadeOnce(MODEL_DIR, MAKE),
        settings={"SEED": SEED, "FAMILY": FAMILY, "MODEL_DIR": MODEL_DIR, "RUN_DIR": RUN_DIR},
    )
# end of Python
