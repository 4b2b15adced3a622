#!/usr/bin/env python3
"""Write a tiny mixture-of-experts checkpoint in Hugging Face format, warmed up on a task until it is partly right.

    python examples/tiny_moe_dppo/make_model.py OUT --seed S [--family NAME] [--width W] [--task CONFIG.yaml | --random]

The same seed gives the same files on the same machine. See `warm_up.py` for what is learned.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.tiny_moe_dppo.model import FAMILIES, byte_tokenizer, random_tiny_model, write_checkpoint
from examples.tiny_moe_dppo.warm_up import warm_up
from megatron_dppo.config.load import load_config
from megatron_dppo.launch import exit_status
from megatron_dppo.launch.arguments import SEEDS, new_folder, whole
from megatron_dppo.tasks.build import build_task

DEMO = Path(__file__).with_name("tiny_moe_dppo.yaml")
# Sums over another number of threads differ in the last bit; and matrices this small gain little from a second thread,
# which on a busy machine waits for the first more than it works.
THREADS = 1


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=new_folder, metavar="OUT", help="folder to write; must not exist or be empty")
    parser.add_argument("--seed", type=whole(0, SEEDS), default=0, help="of the weights and of the warm-up (default 0)")
    parser.add_argument(
        "--family", choices=FAMILIES, default="qwen3_moe", help="model type of transformers (default qwen3_moe)"
    )
    parser.add_argument(
        "--width", type=int, default=1, help="times as wide (default 1; 2 is what FP8 in blocks of 128 x 128 takes)"
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--task",
        type=Path,
        metavar="CONFIG",
        default=DEMO,
        help="run configuration whose `task` section is taught (default: the demo's)",
    )
    kind.add_argument("--random", action="store_true", help="random weights, no warm-up")
    arguments = parser.parse_args(argv)
    task = None if arguments.random else arguments.task
    return exit_status(lambda: make(arguments.out, arguments.seed, arguments.family, task, arguments.width))


def make(out: Path, seed: int, family: str, config_file: Path | None, width: int = 1) -> None:
    """Write the model of `seed` to `out`, warmed up on the task of `config_file` (None: not at all)."""
    torch.set_num_threads(THREADS)
    transformers_logging.disable_progress_bar()
    started = time.monotonic()
    tokenizer = byte_tokenizer()
    model = random_tiny_model(tokenizer, seed, family, width)
    if config_file is not None:
        task = build_task(load_config(config_file).task, tokenizer)
        warm_up(model, tokenizer, task, seed=seed, report=lambda line: print(line, flush=True))
    write_checkpoint(out, model, tokenizer)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    spent = f"{time.monotonic() - started:.0f} s ({time.process_time():.0f} s of CPU)"
    print(f"model of {millions:.2f} M parameters made in {spent}")


if __name__ == "__main__":
    raise SystemExit(main())
