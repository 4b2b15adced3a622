#!/usr/bin/env python3
"""A Megatron-Core or Megatron-LM checkpoint to a Hugging Face folder (`megatron-dppo convert`).

python tools/convert_megatron_to_hf.py SOURCE OUTPUT [--verify] ...
torchrun --nproc-per-node 4 tools/convert_megatron_to_hf.py SOURCE OUTPUT --tensor 2 --expert 2 ...
"""

import sys

from megatron_dppo.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "--to", "hf", *sys.argv[1:]]))
