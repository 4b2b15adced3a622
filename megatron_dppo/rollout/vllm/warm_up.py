"""What vLLM compiles when it first meets a shape: compiled before the first rollout, and kept for the next engine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megatron_dppo.launch.folders import require_writable
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.engine import GenerationRequest, SamplingConfig
from megatron_dppo.rollout.model_facts import ModelFacts
from megatron_dppo.rollout.vllm.core import VllmCore

CACHES = {
    "VLLM_CACHE_ROOT": "vllm",  # and DeepGEMM's
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}
"""Variables that say where vLLM and what compiles for it keep what they make, and our folders for it."""


def keep_compiled(folder: Path | None) -> None:
    """Have the engine's processes, which start later, keep what they compile below `folder` (`rollout.compile_cache`);
    None leaves it where they have it."""
    if folder is None:
        return
    for variable, name in CACHES.items():
        require_writable(folder / name, named=f"rollout.compile_cache={folder}, where an engine starts,", make=True)
        os.environ[variable] = str(folder / name)


def sizes(most: int) -> list[int]:
    """1 up to `most`, as many as kernels can tell apart: they are chosen by the nearest of some powers of two and one
    and a half times those, and compiled anew for numbers (of a token's experts, say) that 16 does not divide."""
    powers = [2**power for power in range(most.bit_length())]
    found = {size + odd for power in powers for size in (power, 3 * power // 2) for odd in (0, 1)}
    return sorted(size for size in found | {most} if size <= most)


def waves(config: RolloutConfig) -> Iterator[list[tuple[int, int]]]:
    """Requests that are asked for together, each as (tokens of the prompt, tokens to sample): prompts of every one of
    `sizes` in all, as many as go into one step; then one token for each of up to `max_num_seqs` sequences at once, in
    more than one wave where answers are short."""
    for total in sizes(min(config.max_num_batched_tokens, config.max_num_seqs * config.max_prompt_tokens)):
        count = -(-total // config.max_prompt_tokens)
        yield [(total // count + (number < total % count), 1) for number in range(count)]
    together, room = sizes(config.max_num_seqs), max(config.max_response_tokens // 2, 1)  # two steps each
    for chunk in (together[start : start + room] for start in range(0, len(together), room)):
        lengths = [2 * sum(size > number for size in chunk) for number in range(chunk[-1])]
        yield [(1, min(length, config.max_response_tokens)) for length in lengths]


async def warm_up(core: VllmCore, facts: ModelFacts, config: RolloutConfig) -> None:
    """Sample `waves` of random tokens with everything recorded, and forget them."""
    tokens = np.random.default_rng(0)
    for number, wave in enumerate(waves(config)):
        requests = [
            GenerationRequest(
                request_id=f"warm-up/{number}/{index}",
                prompt_ids=tokens.integers(0, facts.vocab_size, length).astype(np.int32),
                seed=index,
            )
            for index, (length, _) in enumerate(wave)
        ]
        await asyncio.gather(
            *(
                core.draw(
                    request,
                    SamplingConfig(
                        max_tokens=count,
                        temperature=config.temperature,
                        top_k_logprobs=min(config.top_k_logprobs, facts.vocab_size),
                    ),
                )
                for request, (_, count) in zip(requests, wave, strict=True)
            )
        )
    await core.engine.reset_prefix_cache()
