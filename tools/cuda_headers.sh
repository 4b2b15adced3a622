#!/usr/bin/env bash
# Print what lets compilers find CUDA's, cuDNN's and NCCL's headers in torch's own wheels. A machine's CUDA toolkit, if there
# is one, has no cuDNN headers and may be another version than torch's.
#
#   eval "$(bash tools/cuda_headers.sh VENV)"
set -euo pipefail
"$1/bin/python" - <<'END'
import importlib.util, pathlib, shlex
nvidia = pathlib.Path(importlib.util.find_spec("nvidia").submodule_search_locations[0])
headers = ":".join(sorted(map(str, nvidia.glob("*/include"))))
print(f"export CUDA_HOME={shlex.quote(f'{nvidia}/cu13')} CPATH={shlex.quote(headers)}")
END
