#!/usr/bin/env bash
""":"
# The paper's experiments with Qwen3-30B-A3B (Section 7): DPPO with a mixture-of-experts model.
#
#   bash examples/run_qwen3_moe_dppo.sh [--random-weights [--layers N]] [a.b=c ...]
#   torchrun [--nproc-per-node 8] examples/run_qwen3_moe_dppo.sh [a.b=c ...]
#   bash docker/start_node.sh examples/run_qwen3_moe_dppo.sh [a.b=c ...]      # on each of several nodes, see there
#
# torchrun without options takes all GPUs of the node, as bash does. Each a.b=c overrides a key of the experiment's YAML
# file: algorithm.preset=grpo-clip-higher is a baseline. Engines run on the trainer's GPUs (rollout.placement=colocated)
# or on others (fleet): those that the ranks leave free on this node, or those of the Ray cluster in RAY_ADDRESS.
#
# --random-weights tries the same program without a download: the model's shapes (--layers of its 48) with random
# weights, arithmetic in place of the experiment's questions, small steps, and a layout for the GPUs that are there.
#   NPROC=1 bash examples/run_qwen3_moe_dppo.sh --random-weights --layers 2 rollout.placement=fleet
#
# Variables:
#   EXPERIMENT moe_base_r3 (default), moe_base or moe_thinking
#   MODEL_DIR  folder of the Hugging Face checkpoint (default models/ and the model's name)
#   RUN_DIR    folder of the run: metrics, plots, checkpoints, result (default runs/EXPERIMENT/START-TIME)
#   SEED       of the sampling (default 0); the order of the data is that of task.seed=0
#   NPROC      ranks, when started by bash (default: one per GPU)
#   MAX_RESTARTS  how often lost ranks start again without a new state in between, when started by bash (default 3)
#   RAY_ADDRESS  host:port of a running Ray cluster to take part in; absent, the run starts a Ray of its own
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
    "moe_base_r3": "Qwen/Qwen3-30B-A3B-Base",
    "moe_base": "Qwen/Qwen3-30B-A3B-Base",
    "moe_thinking": "Qwen/Qwen3-30B-A3B",
}

if __name__ == "__main__":  # processes that the run spawns import this file again
    run_experiment(
        main, MODELS, script=__file__, shapes=dict.fromkeys(MODELS.values(), "examples/paper/make_shapes.py")
    )
# end of Python
