#!/usr/bin/env bash
""":"
# The paper's experiments with Gem's tasks and Qwen3-1.7B-Base (Appendix G.3).
#
#   bash examples/run_gem_dppo.sh [a.b=c ...]
#   torchrun --nproc-per-node 8 examples/run_gem_dppo.sh [a.b=c ...]
#   bash docker/start_node.sh examples/run_gem_dppo.sh [a.b=c ...]      # on each of several nodes, see there
#
# Each a.b=c overrides a key of the experiment's YAML file: algorithm.preset=grpo-clip-higher is a baseline. Variables:
#   EXPERIMENT sudoku (default; several turns), arc_1d or acre
#   MODEL_DIR  folder of the Hugging Face checkpoint (default models/ and the model's name)
#   RUN_DIR    folder of the run: metrics, plots, checkpoints, result (default runs/EXPERIMENT/START-TIME)
#   SEED       of the sampling (default 0); the order of the data is that of task.seed=0
#   NPROC      ranks, when started by bash (default: one per GPU)
#   MAX_RESTARTS  how often lost ranks start again without a new state in between, when started by bash (default 3)
#   PYTHON     interpreter, when started by bash (default .venv/bin/python, made first where there is none)
#
# torchrun starts a file with Python, so this one is both: to bash the line above is a command that does nothing, to
# Python it opens a docstring, which closes after bash has handed over to Python.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ -z "${PYTHON:-}" ]; then
  bash "$root/tools/setup_venv.sh"
  PYTHON=${VENV:-$root/.venv}/bin/python
fi
exec "$PYTHON" "${BASH_SOURCE[0]}" "$@"
: <<'# end of Python'
"""

from megatron_dppo.cli import main
from megatron_dppo.launch import run_experiment

MODELS = {
    "sudoku": "Qwen/Qwen3-1.7B-Base",
    "arc_1d": "Qwen/Qwen3-1.7B-Base",
    "acre": "Qwen/Qwen3-1.7B-Base",
}

if __name__ == "__main__":  # processes that the run spawns import this file again
    run_experiment(main, MODELS, script=__file__)
# end of Python
