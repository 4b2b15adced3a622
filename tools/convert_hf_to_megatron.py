#!/usr/bin/env python3
"""A Hugging Face folder to a Megatron-Core checkpoint (`megatron-dppo convert`).

python tools/convert_hf_to_megatron.py SOURCE OUTPUT [--verify] ...
torchrun --nproc-per-node 4 tools/convert_hf_to_megatron.py SOURCE OUTPUT --tensor 2 --expert 2 ...
"""

import sys

from megatron_dppo.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "--to", "state", *sys.argv[1:]]))
