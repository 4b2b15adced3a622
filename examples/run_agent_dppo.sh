#!/usr/bin/env bash
""":"
# Train an agent that has a Python tool, with a tiny Qwen3-MoE, on two CPU cores and without network.
#
#   bash examples/run_agent_dppo.sh [a.b=c ...]
#   torchrun --nproc-per-node 2 examples/run_agent_dppo.sh [a.b=c ...]
#
# The agent is examples/agent/agent.py. Each a.b=c overrides a key of examples/agent/agent_dppo.yaml. Variables:
#   SEED       of the model and of the run's sampling (default 0)
#   MODEL_DIR  folder of the model to train; made when absent (default runs/agent_model/seed-SEED)
#   RUN_DIR    folder of the run: metrics, plots, checkpoints, result (default runs/agent_dppo/START-TIME)
#   NPROC      ranks, when started by bash (default 2)
#   PYTHON     interpreter, when started by bash (default .venv/bin/python, made first where there is none)
#
# To bash the first line is a command that does nothing, to Python it opens a docstring, see run_tiny_moe_dppo.sh.
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
from pathlib import Path

from megatron_dppo.cli import main
from megatron_dppo.launch import MadeOnce, job_stamp, run_example

ROOT = Path(__file__).resolve().parent.parent
SEED = os.environ.get("SEED", "0")
MODEL_DIR = Path(os.environ.get("MODEL_DIR", ROOT / f"runs/agent_model/seed-{SEED}"))
RUN_DIR = Path(os.environ.get("RUN_DIR", ROOT / f"runs/agent_dppo/{job_stamp()}"))
CONFIG = ROOT / "examples/agent/agent_dppo.yaml"

if __name__ == "__main__":  # processes that the run spawns import this file again
    run_example(
        main,
        [
            *("train", str(CONFIG), f"model.path={MODEL_DIR}", f"run.dir={RUN_DIR}", f"run.seed={SEED}"),
            f"task.agent.function={ROOT}/examples/agent/agent.py:episode",
        ],
        script=__file__,
        processes=os.environ.get("NPROC", "2"),
        model=MadeOnce(MODEL_DIR, [f"{ROOT}/examples/agent/make_model.py", "{out}", "--seed", SEED]),
        settings={"SEED": SEED, "MODEL_DIR": MODEL_DIR, "RUN_DIR": RUN_DIR},
    )
# end of Python
