#!/usr/bin/env bash
# Is this image whole? Run inside it, as its own user:
#
#   docker run --rm --shm-size 2g megatron-dppo:cpu bash docker/check_image.sh
#   docker run --rm --gpus all --shm-size 16g --ulimit memlock=-1 megatron-dppo:gpu bash docker/check_image.sh
#
# Imports and versions, the doctor, the tools, the folders that must be writable, the health check, and one step of training:
# where there is a GPU of a large model's shapes with random weights, else of the demo; an image for GPUs says then that it
# needs one. Exit status 0 where all of it is well.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
say() { echo "check_image: $*"; }

say "user $(id -u):$(id -g), Python $("$PYTHON" -V)"
"$PYTHON" -W ignore - <<'END'
from importlib import import_module, metadata
names = {"megatron_dppo": "megatron-dppo", "torch": "torch", "megatron.core": "megatron-core", "transformers": "transformers",
         "ray": "ray", "vllm": None}
try:
    metadata.version("transformer-engine-torch")
    names |= {"transformer_engine.pytorch": "transformer-engine"}
except metadata.PackageNotFoundError:
    pass
for module, package in names.items():
    found = import_module(module)
    print(f"check_image: {module} {metadata.version(package) if package else found.__version__}")
END

say "doctor"
megatron-dppo doctor
for tool in convert_hf_to_megatron convert_megatron_to_hf; do
  "$PYTHON" "tools/$tool.py" --help >/dev/null
  say "tools/$tool.py"
done
for folder in runs models "$HOME" ${HF_HOME:+"$HF_HOME"}; do
  mkdir -p "$folder"
  touch "$folder/.check" && rm "$folder/.check"
  say "$folder can be written"
done
"$PYTHON" -m megatron_dppo.launch.heartbeat runs

folder=$(mktemp -d runs/check-XXXXXX)
trap 'rm -rf "$folder"' EXIT
export RUN_DIR=$folder/run MODEL_DIR=$folder/model MAX_RESTARTS=0
if nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
  say "one step of Qwen3-30B-A3B's shapes, 2 layers"
  NPROC=1 bash examples/run_qwen3_moe_dppo.sh --random-weights --layers 2 trainer.steps=1
elif "$PYTHON" -c "from importlib import metadata as m; m.version('transformer-engine-torch')" 2>/dev/null; then
  say "all but the step is well: this image is for GPUs, and none is seen here (docker run --gpus all)"
  exit 1
else
  say "one step of the demo"
  bash examples/run_tiny_moe_dppo.sh trainer.steps=1 trainer.export_hugging_face=false evaluation.every=0
fi
grep -q '"step": *1' "$RUN_DIR/metrics.jsonl"
say "this image is whole"
