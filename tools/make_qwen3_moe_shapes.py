#!/usr/bin/env python3
"""Write the folder of a model of Qwen3-30B-A3B's shapes that has no weights: config.json and a byte-level tokenizer.

    python tools/make_qwen3_moe_shapes.py OUT [--layers N]

A run with `model.random_weights=true` draws the weights itself.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_dppo.errors import UserError
from megatron_dppo.launch import exit_status
from megatron_dppo.models.qwen3_30b_a3b import LAYERS, qwen3_30b_a3b, write_folder
from megatron_dppo.models.tiny_tokenizer import byte_tokenizer


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write; must not exist or be empty")
    parser.add_argument("--layers", type=int, default=LAYERS, help=f"of the model (default {LAYERS})")
    arguments = parser.parse_args(argv)
    return exit_status(lambda: make(arguments.out, arguments.layers))


def make(out: Path, layers: int) -> None:
    """Write the folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists already; name another folder or remove it")
    if not 1 <= layers <= LAYERS:
        raise UserError(f"--layers {layers}: the model has 1 to {LAYERS}")
    tokenizer = byte_tokenizer()
    write_folder(out, qwen3_30b_a3b(tokenizer, layers), tokenizer)


if __name__ == "__main__":
    raise SystemExit(main())
