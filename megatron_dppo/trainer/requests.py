"""Prompts to requests for a rollout engine."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_dppo.rollout.protocol import GenerationRequest
from megatron_dppo.rollout.seeds import TRAINING, request_seed
from megatron_dppo.tasks.task import Prompt


def requests_for(
    prompts: Sequence[Prompt], samples: int, *, run_seed: int, step: int, stream: int
) -> list[GenerationRequest]:
    """`samples` requests per prompt, prompt by prompt. Seeds derive from (run, stream, step, prompt, sample)."""
    return [
        GenerationRequest(
            request_id=f"{'train' if stream == TRAINING else 'eval'}/{step}/{prompt.index}/{sample}",
            prompt_ids=prompt.prompt_ids,
            seed=request_seed(run_seed, step, prompt.index, sample, stream=stream),
        )
        for prompt in prompts
        for sample in range(samples)
    ]
