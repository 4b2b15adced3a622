"""Prompts to requests for a rollout engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from megatron_dppo.rollout.engine import GenerationRequest
from megatron_dppo.rollout.seeds import TRAINING, request_seed
from megatron_dppo.tasks.task import Prompt


def requests_for(
    prompts: Sequence[Prompt], samples: int, *, run_seed: int, step: int, stream: int
) -> list[GenerationRequest]:
    """`samples` requests per prompt, prompt by prompt. Seeds derive from (run, stream, step, prompt, sample); no two
    requests of a step have one name."""
    return [
        GenerationRequest(
            request_id=sequence_name(prompt, sample, step=step, stream=stream),
            prompt_ids=prompt.prompt_ids,
            seed=request_seed(run_seed, step, prompt.index, sample, stream=stream),
        )
        for prompt, sample in numbered(prompts, samples)
    ]


def sequence_name(prompt: Prompt, sample: int, *, step: int, stream: int) -> str:
    """Unique within a run."""
    return f"{'train' if stream == TRAINING else 'eval'}/{step}/{prompt.index}/{sample}"


def numbered(prompts: Sequence[Prompt], samples: int) -> Iterator[tuple[Prompt, int]]:
    """Each prompt with the numbers of its samples, from 0. A prompt that comes twice, as in a step that begins in
    one epoch and ends in the next, goes on counting."""
    asked: Counter[int] = Counter()
    for prompt in prompts:
        first = asked[prompt.index]
        asked[prompt.index] += samples
        yield from ((prompt, sample) for sample in range(first, first + samples))
