#!/usr/bin/env bash
# Make the virtual environment with the pinned packages, or do nothing when it is there and up to date.
#
#   tools/setup_venv.sh
#
# Variables:
#   VENV     folder of the environment (default: .venv beside this repository's Makefile)
#   PYTHON   interpreter to make it from (default: the first Python 3.12, else 3.13, found as python3, python3.12,
#            python3.13 or through uv)
#   EXTRA    cpu | gpu: which vLLM and whether Transformer Engine (default: gpu where nvidia-smi lists a GPU, else cpu)
#
# Safe to call at any time: one run at a time per environment, and one that was interrupted is made anew.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" # pyenv and uv read .python-version here
venv=${VENV:-$root/.venv}
stamp=$venv/.setup-stamp           # what the finished environment was made from
unfinished=$venv/.setup-unfinished # there while packages are being installed

say() { echo "setup: $*" >&2; }
die() {
  say "$@"
  exit 1
}

extra=${EXTRA:-}
if [ -z "$extra" ]; then
  extra=cpu
  if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then extra=gpu; fi
fi
case $extra in cpu | gpu) ;; *) die "EXTRA=$extra is neither cpu nor gpu" ;; esac

is_version() { # is_version COMMAND 3.12: is it a working interpreter of that version?
  command -v "$1" >/dev/null 2>&1 &&
    "$1" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$2')" >/dev/null 2>&1
}

find_python() { # prints an interpreter, or nothing
  local version candidate
  for version in 3.12 3.13; do
    for candidate in "${PYTHON:-python3}" "${PYTHON:-python$version}"; do
      if is_version "$candidate" "$version"; then
        command -v "$candidate"
        return
      fi
    done
  done
  if [ -z "${PYTHON:-}" ] && command -v uv >/dev/null; then
    uv python find '>=3.12,<3.14' 2>/dev/null || { uv python install 3.12 >&2 && uv python find 3.12; } || true
  fi
}

retry() { # networks fail now and then: three tries
  local try
  for try in 1 2 3; do
    if "$@"; then return 0; fi
    if [ "$try" -lt 3 ]; then
      say "'$1' failed; trying again in 5 s"
      sleep 5
    fi
  done
  return 1
}

fingerprint() { # everything that decides what is in the environment
  { echo "$extra $root"; cat pyproject.toml constraints/*.txt tools/setup_venv.sh tools/cuda_headers.sh; } | sha256sum | cut -d' ' -f1
}

up_to_date() { [ -x "$venv/bin/python" ] && [ ! -e "$unfinished" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$(fingerprint)" ]; }

if up_to_date; then exit 0; fi
mkdir -p "$(dirname "$venv")"
exec 9>"$venv.lock"
if ! flock --nonblock 9; then
  say "another set-up of $venv is running; waiting for it"
  flock 9
fi
if up_to_date; then exit 0; fi

if [ -e "$unfinished" ]; then
  say "an earlier set-up did not finish; starting anew"
  rm -rf "$venv.discarded"
  mv "$venv" "$venv.discarded" # at once, so that an interruption here leaves no half of it behind
fi
rm -rf "$venv.discarded"
if [ ! -x "$venv/bin/python" ]; then
  [ ! -e "$venv" ] || rmdir "$venv" 2>/dev/null || die "$venv exists but holds no Python; move it away and try again"
  python=$(find_python)
  [ -n "$python" ] || die "found no Python 3.12 or 3.13 as python3, python3.12, python3.13 or through uv." \
    "Install one (for example: apt install python3.12-venv, pyenv install 3.12, or uv python install 3.12)" \
    "or name it: PYTHON=/path/to/python3.12 make ..."
  say "making $venv with $("$python" --version) for $extra (about 1 minute with a warm package cache, 3 to 6 without; 6 GB)"
  mkdir -p "$venv"
  touch "$unfinished"
  "$python" -m venv "$venv" || die "'$python -m venv' failed: install the venv module (apt install python3.12-venv)"
elif ! is_version "$venv/bin/python" 3.12 && ! is_version "$venv/bin/python" 3.13; then
  die "$venv has $("$venv/bin/python" --version 2>&1); this project needs 3.12 or 3.13. Remove $venv and try again"
else
  say "bringing $venv up to date for $extra"
  touch "$unfinished"
fi

export PIP_DISABLE_PIP_VERSION_CHECK=1
overrides=()
if [ "$extra" = cpu ]; then overrides=(--override constraints/cpu-overrides.txt); fi
install() {
  retry "$venv/bin/python" -m pip install --quiet -r constraints/bootstrap.txt || return 1
  if [ "$extra" = gpu ]; then # TransformerEngine's part for torch is compiled against the headers in torch's wheels
    retry "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" -c constraints/gpu.txt \
      torch nvidia-cuda-nvcc nvidia-cuda-crt nvidia-cuda-cccl || return 1
    eval "$(bash tools/cuda_headers.sh "$venv")"
  fi
  retry "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" "${overrides[@]}" -c "constraints/$extra.txt" \
    -e ".[$extra,dev]" || return 1
  # Packages that work with what is installed, although their metadata asks for other versions.
  retry "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --no-deps -r constraints/no-deps.txt
}
install || die "installing the packages failed, for the reason above. Is the package index reachable (pip's and uv's own" \
  "settings apply)? Are 8 GB of disk free? Then try again"

fingerprint >"$stamp"
rm -f "$unfinished"
say "$venv is ready"
