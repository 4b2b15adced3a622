#!/usr/bin/env bash
# The stability study of Section 5 in small (Figures 3 to 5): every algorithm, several seeds, one picture and one table.
#
#   bash examples/stability_study.sh [a.b=c ...]
#
# Each a.b=c overrides a key of examples/stability_study/stability_study.yaml in all runs, for example trainer.steps=200, or
# an engine with noise on its weights (examples/noisy_engine.py) for a larger mismatch. Runs that are complete are not repeated, and one that was
# interrupted goes on from its last checkpoint: start the same command again. A run that fails does not keep the others
# from running; it is named at the end, and tried again the next time. Variables:
#   OUT         folder of the study (default runs/stability_study); its runs are OUT/ALGORITHM/seed-N
#   SEEDS       of the sampling (default "0 1 2"); all runs see the same questions in the same order
#   ALGORITHMS  some of pg-is cispo grpo-clip-higher minirl minirl-tis dppo-binary-tv dppo-binary-kl
#               dppo-binary-kl-decoupled mask-0.5 mask-0.8 mask-0.5-recompute (default: all of
#               these), and of ppo-dual-clip token-mis icepop icepop-decoupled sequence-tis sequence-mis
#               geometric-mis gspo, which the picture shows beside DPPO
#   MODEL_DIR   the model all runs start from; made when absent (default runs/tiny_moe_model/seed-0)
#   NPROC       ranks of each run (default 1)
#   PYTHON      interpreter (default .venv/bin/python, made first where there is none)
set -euo pipefail
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
unset PYTHONDONTWRITEBYTECODE # every process would compile Megatron-Core and vLLM anew
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ -z "${PYTHON:-}" ]; then
  bash "$root/tools/setup_venv.sh"
  PYTHON=${VENV:-$root/.venv}/bin/python
fi
out=${OUT:-$root/runs/stability_study}
model=${MODEL_DIR:-$root/runs/tiny_moe_model/seed-0}
study=$root/examples/stability_study
config=$study/stability_study.yaml

trap 'exit 130' INT TERM # Ctrl-C ends the study, not just one of its runs
failed=
plan=$("$PYTHON" "$study/study.py" plan "$config" "$out" "${SEEDS:-0 1 2}" "${ALGORITHMS:-}" "$@")
if [ ! -d "$model" ]; then "$PYTHON" "$root/examples/tiny_moe_dppo/make_model.py" "$model" --seed 0; fi
while read -r -u 3 seed algorithm options; do
  echo "== $algorithm, seed $seed"
  if [ "$options" = complete ]; then continue; fi
  # shellcheck disable=SC2086  # the options are several words without spaces in them
  "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "${NPROC:-1}" -m megatron_dppo.cli train "$config" \
    "model.path=$model" "run.dir=$out/$algorithm/seed-$seed" "run.name=$algorithm" "run.seed=$seed" "$@" $options ||
    failed="$failed $algorithm/seed-$seed"
done 3<<<"$plan"
"$PYTHON" "$study/study.py" report "$out"
if [ -n "$failed" ]; then
  echo "stability study: these runs failed, see the reasons above:$failed" >&2
  exit 1
fi
