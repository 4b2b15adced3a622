"""`megatron-dppo doctor`."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron_dppo.errors import UserError
from megatron_dppo.launch.imports import ignore_warnings_of_libraries
from megatron_dppo.launch.nodes import listed_gpus
from megatron_dppo.launch.secrets import redact
from megatron_dppo.planner.gpus import GPUS, find_gpu
from megatron_dppo.preflight.finding import Finding


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, nargs="?", help="configuration to check as well")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="config keys to change")
    parser.add_argument("--ranks", type=int, help="ranks the configuration will run on (the fewest it can)")
    parser.add_argument("--gpu", action="store_true", help="GPUs are expected here: their absence is an error")
    parser.add_argument(
        "--gpu-kind",
        metavar="KIND",
        help=f"GPUs whose memory CONFIG has to fit (those of this machine): {', '.join(GPUS)}",
    )
    parser.add_argument(
        "--bandwidth", action="store_true", help="measure the network (started by torchrun on all nodes)"
    )
    parser.add_argument("--min-bandwidth", type=float, metavar="GB/s", help="what it must reach (NVLink 50, nodes 5)")
    parser.add_argument(
        "--parity",
        type=Path,
        metavar="MODEL",
        help="instead: compare the engine's log-probabilities with the trainer's for this Hugging Face folder, on the "
        "first rollout of CONFIG's run or on 64 sums (in CONFIG's layout: under torchrun where it has several ranks)",
    )
    parser.add_argument(
        "--random-weights",
        action="store_true",
        help="of --parity: draw the weights; MODEL needs no more than config.json and a tokenizer",
    )
    parser.add_argument("--layers", type=int, metavar="N", help="of --random-weights: only the first N of MODEL")
    parser.add_argument(
        "--precision",
        action="append",
        metavar="ENGINE[/TRAINER]",
        help="of --parity, may be repeated (default: float32 and bfloat16 on both sides)",
    )
    parser.add_argument(
        "--reference",
        action="store_true",
        help="of --parity: compare both with transformers in float32 as well, over the same tokens",
    )
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        help="folder for the picture and numbers of --parity (default: parity/ and MODEL's name)",
    )
    parser.add_argument("--strict", action="store_true", help="warnings count as errors")


def run_doctor(arguments: argparse.Namespace) -> int:
    """One line per finding on standard output; where all is well none, but for the sandbox that the machine has and the
    memory that a configuration needs.
    0: no error; 1: at least one."""
    if arguments.ranks is not None and arguments.ranks < 1:
        raise UserError(f"--ranks {arguments.ranks}: must be 1 or more")
    ignore_warnings_of_libraries()
    failed = False
    for finding in _all(arguments):
        print(redact(str(finding)), flush=True)
        failed |= finding.level == "error" or (arguments.strict and finding.level == "warning")
    return 1 if failed else 0


def _given(arguments: argparse.Namespace, *names: str) -> str:
    """Which of these options were given, in words; "" where none was."""
    values = {name: getattr(arguments, name) for name in names}
    given = [name for name, value in values.items() if value is not None and value is not False]  # 0 was given
    return ", ".join(f"--{name.replace('_', '-')}" for name in given)


def _parity(arguments: argparse.Namespace) -> Iterator[Finding]:
    from megatron_dppo.doctor.parity import Precision, parity_config, with_layers
    from megatron_dppo.doctor.parity_report import run_parity

    model, file, overrides = arguments.parity, arguments.config, list(arguments.overrides)
    if file is not None and "=" in file.name and not file.exists():  # no CONFIG, and the first override in its place
        file, overrides = None, [str(file), *overrides]
    precisions = [Precision.parse(text) for text in arguments.precision or ()]
    out = arguments.out or Path("parity") / model.resolve().name
    if arguments.layers is not None:
        if not arguments.random_weights:
            raise UserError("--layers goes with --random-weights: a checkpoint has its own")
        model = with_layers(model, arguments.layers, out / f"{arguments.layers}-layers")
    config = parity_config(model, file, overrides, out, random_weights=arguments.random_weights)
    quantized = config.rollout.quantization != "none"
    if quantized and any(precision.engine == "float32" for precision in precisions):
        raise UserError(
            f"--precision float32 with rollout.quantization={config.rollout.quantization}, which is of bfloat16 and "
            "float16; set --precision bfloat16, or bfloat16/float32"
        )
    precisions = precisions or [
        Precision.parse(name) for name in (["bfloat16"] if quantized else ["float32", "bfloat16"])
    ]
    yield from run_parity(config, precisions, reference=arguments.reference)


def _all(arguments: argparse.Namespace) -> Iterator[Finding]:
    from megatron_dppo.doctor import machine

    planned_gpu = None if arguments.gpu_kind is None else find_gpu(arguments.gpu_kind, option="--gpu-kind")
    if arguments.parity is not None:
        if others := _given(arguments, "ranks", "gpu", "gpu_kind", "bandwidth", "min_bandwidth"):
            raise UserError(f"{others}: not for --parity, which compares and checks nothing else; leave it out")
        yield from _parity(arguments)
        return
    if arguments.config is None and (others := _given(arguments, "ranks", "gpu_kind")):
        raise UserError(f"{others}: name a configuration as well, which is checked for that")
    if _given(arguments, "precision", "out", "random_weights", "reference", "layers"):
        raise UserError("--precision, --out, --random-weights, --reference and --layers belong to --parity MODEL")
    least = arguments.min_bandwidth
    if least is not None and not (arguments.bandwidth and 0 < least < math.inf):
        raise UserError(f"--min-bandwidth {least:g}: must be GB/s above 0, beside --bandwidth")
    there = listed_gpus() > 0
    yield from machine.check_python()
    yield from machine.check_packages(gpu=there or arguments.gpu)
    yield from machine.check_cuda(expected=arguments.gpu)
    if there and "RANK" not in os.environ:
        yield from machine.check_peers()
    yield from machine.check_files()
    yield from machine.check_shared_memory()
    yield from machine.check_locked_memory()
    yield from machine.check_sandbox()
    yield from machine.check_interfaces()
    yield from machine.check_rendezvous()
    yield from machine.check_listening()
    yield from machine.check_ray()
    if arguments.bandwidth:
        if "WORLD_SIZE" not in os.environ:
            raise UserError(
                "--bandwidth: start it with torchrun: torchrun --nproc-per-node 8 --no-python megatron-dppo doctor ..."
            )
        yield from machine.check_bandwidth(None if least is None else least * 1e9)
    if arguments.config is not None:
        from megatron_dppo.doctor.configuration import check_configuration

        sys.stdout.flush()
        yield from check_configuration(arguments.config, arguments.overrides, ranks=arguments.ranks, gpu=planned_gpu)
