#!/usr/bin/env python3
"""Convert a training state to a Hugging Face folder (`megatron-dppo convert`, this direction only).

python tools/convert_megatron_to_hf.py SOURCE OUTPUT [--verify] [--dtype bfloat16] ...
torchrun --nproc-per-node 4 tools/convert_megatron_to_hf.py SOURCE OUTPUT --tensor 2 --expert 2 ...
"""

import argparse
import sys

from megatron_dppo.checkpoint.convert_arguments import add_convert_arguments, run_convert
from megatron_dppo.launch import exit_status

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    add_convert_arguments(parser)
    arguments = parser.parse_args()
    sys.exit(exit_status(lambda: run_convert(arguments, only="to-hf")))
