#!/usr/bin/env python3
"""Tokens per second of engines beside each other: the same prompts, lengths and records, in turns.

    python tools/bench_engines.py MODEL [a.b=c ...] [--prompts 256] [--tokens 64] [--repeats 5]

Overrides are settings of the section `rollout`, without its name. Responses end by themselves or after --tokens. The
first turn of each engine is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import numpy as np

from megatron_dppo.config.load import build_config
from megatron_dppo.launch import exit_status
from megatron_dppo.launch.arguments import model_folder, whole
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.engine import GenerationRequest, RolloutEngine, SamplingConfig
from megatron_dppo.rollout.start import open_engine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=model_folder)
    parser.add_argument("overrides", nargs="*", metavar="a.b=c")
    parser.add_argument("--engines", nargs="+", default=["vllm", "reference"])
    parser.add_argument("--prompts", type=whole(), default=256)
    parser.add_argument("--prompt-tokens", type=whole(), default=32)
    parser.add_argument("--tokens", type=whole(), default=64)
    parser.add_argument("--repeats", type=whole(), default=5)
    arguments = parser.parse_args()
    return exit_status(lambda: compare(arguments))


def compare(arguments: argparse.Namespace) -> None:
    """The engines' rates on standard output."""
    lengths = {"max_prompt_tokens": arguments.prompt_tokens, "max_response_tokens": arguments.tokens}
    configs = {
        name: build_config(RolloutConfig, lengths | {"engine": name}, arguments.overrides, where="the command")
        for name in arguments.engines
    }
    seconds: dict[str, list[float]] = {name: [] for name in configs}
    engines: dict[str, RolloutEngine] = {}
    try:
        for name, config in configs.items():
            engines[name] = open_engine(arguments.model, config)
        for repeat in range(arguments.repeats + 1):
            for name, engine in engines.items():
                spent, tokens = turn(engine, repeat, arguments)
                if repeat:
                    seconds[name].append(spent / tokens)
    finally:
        for engine in engines.values():
            engine.close()
    for name, found in seconds.items():
        rates = [1 / one for one in found]
        print(f"{name}: {statistics.median(rates):,.0f} tokens/s, {min(rates):,.0f} to {max(rates):,.0f}")


def turn(engine: RolloutEngine, repeat: int, arguments: argparse.Namespace) -> tuple[float, int]:
    """Seconds and sampled tokens of one rollout."""
    rng = np.random.default_rng(repeat)
    requests = [
        GenerationRequest(
            request_id=f"{repeat}/{number}/0",
            prompt_ids=rng.integers(2, 250, arguments.prompt_tokens).astype(np.int32),
            seed=number,
        )
        for number in range(arguments.prompts)
    ]
    start = time.perf_counter()
    batch = engine.generate(requests, SamplingConfig(max_tokens=arguments.tokens, top_k_logprobs=20), training=True)
    return time.perf_counter() - start, int(batch.loss_mask.sum())


if __name__ == "__main__":
    sys.exit(main())
