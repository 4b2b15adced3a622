"""The arguments of `megatron-dppo convert`. Heavy imports happen when it runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_dppo.launch.arguments import real, whole
from megatron_dppo.launch.imports import ignore_warnings_of_libraries, uncollected

DESCRIPTION = (
    "Convert a Hugging Face folder to a training state of Megatron-Core, a training state (or the latest one under a "
    "run's checkpoint folder) or a checkpoint of Megatron-LM or Megatron-Bridge to a Hugging Face folder, or what --to "
    "says. The source's kind is seen from its files. Runs in one process, or under torchrun with the layout options "
    "below."
)
_LAYOUT = ("tensor", "pipeline", "virtual_pipeline", "expert", "expert_tensor")


def add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command on `parser`."""
    parser.description = DESCRIPTION
    parser.add_argument("source", type=Path, help="folder to read")
    parser.add_argument("output", type=Path, help="folder to create")
    parser.add_argument(
        "--to",
        choices=("hf", "state", "megatron-lm"),
        help="format of the result; default: hf, of a Hugging Face folder state",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the result; default: as stored")
    parser.add_argument(
        "--allow-inf", action="store_true", help="let numbers beyond the type's range (float16: 65504) become inf"
    )
    parser.add_argument("--verify", action="store_true", help="read the result again and compare logits")
    parser.add_argument("--overwrite", action="store_true", help="replace what is at OUTPUT")
    parser.add_argument(
        "--shard-gb", type=real(1e-9), default=5.0, help="largest Hugging Face weight file, GB (default 5)"
    )
    parser.add_argument(
        "--base",
        type=Path,
        metavar="HF_FOLDER",
        help="model that a state's adapters were trained on, or whose config.json Megatron-LM's folder goes with",
    )
    for name in _LAYOUT:
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=whole(), default=1, metavar="N", help="of this conversion"
        )


def run_convert(arguments: argparse.Namespace) -> int:
    """Convert as the parsed arguments say."""
    ignore_warnings_of_libraries()
    with uncollected():
        from megatron_dppo.checkpoint.convert import convert_command
        from megatron_dppo.models.parallel import ParallelConfig

    sizes = {name: getattr(arguments, name) for name in _LAYOUT}
    convert_command(
        arguments.source,
        arguments.output,
        to=arguments.to,
        parallel=ParallelConfig(**sizes, sequence_parallel=arguments.tensor > 1),
        dtype=arguments.dtype,
        verify=arguments.verify,
        overwrite=arguments.overwrite,
        shard_bytes=int(arguments.shard_gb * 1e9),
        base=arguments.base,
        allow_inf=arguments.allow_inf,
    )
    return 0
