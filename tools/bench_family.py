"""The whole loop with a family's published shapes cut to a few layers of experts, random weights, vLLM and R3.

    python tools/bench_family.py GLM-4.5-Air rollout.placement=fleet   # a dense layer and 2 with experts
    python tools/bench_family.py GLM-4.5-Air --moe-layers 1 2 rollout.placement=fleet   # and the full depth's MFU
    python tools/bench_family.py DeepSeek-V3 --moe-layers 1 lora.rank=32                # adapters
    python tools/bench_family.py MiniMax-M2 rollout.placement=fleet optimizer.cpu_offload_fraction=0.5

By the planner two layers with experts are 112 GiB for a trainer of GLM-4.5-Air and 150 for one of MiniMax-M2. With
`fleet` the rank has one H200 and the engine another; on one (`colocated`, the default) the host must hold what the
trainer lends, 16 bytes a parameter. With `rollout.enable_sleep=false` both stay on it:
GLM-4.5-Air's two layers with `rollout.gpu_memory_utilization=0.125` and packs of 12,288 tokens. An engine takes 95 s to
start with CUDA graphs, less with `rollout.enforce_eager=true`.

Shapes are those of `tests/models/public_configs.py`. Each depth is a run of `examples/run_qwen3_moe_dppo.sh
--random-weights`, four steps unless an override says otherwise, in `runs/bench_family/NAME-N`. Printed of each: the
largest |log pi - log mu| of the first rollout with the engine's routes and without, tokens/s of rollout and training,
MFU of training, and the trainer's peak beside the planner's. Markdown on standard output. The first step is left out of
times; a line through the medians of two depths gives the time of the whole model, and with its FLOPs the MFU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.paper.make_shapes import write_folder
from examples.tiny_moe_dppo.model import byte_tokenizer
from megatron_dppo.config.load import load_config
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import UserError
from megatron_dppo.launch import exit_status
from megatron_dppo.launch.arguments import whole
from megatron_dppo.models.family import text_fields
from megatron_dppo.models.flops import peak_flops, training_flops
from megatron_dppo.models.hf_config import HFConfig, resolve_hf_config
from megatron_dppo.planner.gpus import GIB, find_gpu
from megatron_dppo.planner.memory import stage_memory
from megatron_dppo.planner.workload import Layout
from tests.models.public_configs import CONFIGS
from tools.actor_step.cases import cut

ROOT = Path(__file__).resolve().parents[1]


def ending(name: str, moe_layers: int) -> dict[str, Any]:
    """`cut`, with the tokenizer's stop token where stop tokens are published in another file than config.json."""
    whole = cut(name, moe_layers)
    decoder = {"eos_token_id": byte_tokenizer().eos_token_id} | text_fields(whole)
    return decoder if text_fields(whole) is whole else whole | {"text_config": decoder}


def run(folder: Path, output: Path, overrides: list[str]) -> list[dict[str, float]]:
    """The metrics of each step."""
    script = [str(ROOT / "examples/run_qwen3_moe_dppo.sh"), "--random-weights", "trainer.steps=4", *overrides]
    environment = {"NPROC": "1", "PYTHON": sys.executable} | os.environ
    environment |= {"MODEL_DIR": str(folder), "RUN_DIR": str(output)}
    if status := subprocess.run(["bash", *script], env=environment, check=False).returncode:
        raise SystemExit(status)  # the script has said why
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "time/train_s" in line]


def flops(model: HFConfig, tokens: float, sequences: int) -> float:
    """Of a step's training, all sequences as long as their mean."""
    return training_flops(model, np.full(sequences, tokens / sequences))


def planned_gib(config: Config, model: HFConfig, gpus: int, tokens: float, sequences: int) -> float:
    """The planner's peak of a rank, for packs and sequences as long as they were: all packs of a mini-batch are."""
    of_rank = tokens * config.trainer.prompts_per_mini_batch / config.trainer.prompts_per_step / gpus
    packs = math.ceil(of_rank / config.actor.max_tokens_per_microbatch)
    layout = Layout(
        model=model,
        gpu=find_gpu("h200-141g"),
        gpus=gpus,
        parallel=config.parallel,
        recompute=config.actor.recompute,
        recompute_layers=config.actor.recompute_layers,
        microbatch_tokens=int(of_rank / packs),
        attention_span=int(tokens / sequences),
        optimizer_offload=config.optimizer.cpu_offload_fraction,
        lora=config.lora,
    )
    return stage_memory(layout, 0, 1).peak / GIB


def read_arguments(words: list[str]) -> tuple[str, list[int], list[str]]:
    """The model's name, the depths and the run's overrides, which may stand anywhere."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(CONFIGS))
    parser.add_argument("--moe-layers", type=whole(), nargs="+", default=[2], metavar="N")
    arguments = parser.parse_args([word for word in words if "=" not in word])
    return arguments.name, arguments.moe_layers, [word for word in words if "=" in word]


def main() -> int:
    name, moe_layers, overrides = read_arguments(sys.argv[1:])
    if not torch.cuda.is_available():
        raise UserError("bench_family: it measures GPUs and found none")
    peak = peak_flops(torch.cuda.get_device_name()) or float("nan")
    gpus = int(os.environ.get("NPROC", "1"))
    depths: list[tuple[int, float]] = []
    tokens, sequences = 0.0, 1
    print("| layers | max gap, R3 on / off | rollout, training tokens/s | MFU | trainer's peak, planned, GiB |")
    print("|---|---|---|---|---|")
    for count in moe_layers:
        output = ROOT / f"runs/bench_family/{name}-{count}"
        config, folder = ending(name, count), output / "model"
        if not folder.exists():
            write_folder(folder, config, byte_tokenizer())
        steps = run(folder, output / "run", overrides)
        model, first, later = resolve_hf_config(config), steps[0], steps[1:]
        settings = load_config(output / "run/config.yaml", [])
        sequences = settings.trainer.prompts_per_step * settings.trainer.samples_per_prompt
        seconds = statistics.median(step["time/train_s"] for step in later)
        tokens = statistics.median(step["data/trained_tokens"] for step in later)
        rollout = statistics.median(step["data/tokens"] / step["time/rollout_s"] for step in later)
        gaps = [first[f"{group}/max_abs_logp_gap"] for group in ("parity", "parity_without_replay")]
        print(
            f"| {model.layers} | {gaps[0]:.3f} / {gaps[1]:.3f} | {rollout:,.0f}, "
            f"{tokens / seconds:,.0f} | {flops(model, tokens, sequences) / seconds / peak / gpus:.1%} | "
            f"{later[-1]['memory/rank_peak_gib']:.2f}, "
            f"{planned_gib(settings, model, gpus, tokens, sequences):.2f} |"
        )
        depths.append((model.layers, seconds))
    if len(depths) > 1:
        (low, short), (high, long) = depths[0], depths[-1]
        whole = resolve_hf_config(dict(CONFIGS[name]))
        seconds = short + (long - short) / (high - low) * (whole.layers - low)
        mfu = flops(whole, tokens, sequences) / seconds / peak / gpus
        print(f"\nMFU of all {whole.layers} layers: {mfu:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
