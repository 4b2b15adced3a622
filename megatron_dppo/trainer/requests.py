"""Prompts to requests for a rollout engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_dppo.rollout.engine import GenerationRequest
from megatron_dppo.rollout.seeds import TRAINING, request_seed
from megatron_dppo.tasks.task import Prompt


@dataclass(frozen=True)
class Draws:
    """What the names and seeds of a step's answers derive from."""

    run_seed: int
    step: int
    stream: int = TRAINING

    def name(self, prompt: Prompt, sample: int) -> str:
        """Unique within a run."""
        return f"{'train' if self.stream == TRAINING else 'eval'}/{self.step}/{prompt.index}/{sample}"

    def seed(self, prompt: Prompt, sample: int, turn: int = 0) -> int:
        return request_seed(self.run_seed, self.step, prompt.index, sample, stream=self.stream, turn=turn)


def requests_for(prompts: Sequence[Prompt], samples: int, draws: Draws) -> list[GenerationRequest]:
    """`samples` requests per prompt, prompt by prompt. No two requests of a step have one name."""
    return [
        GenerationRequest(
            request_id=draws.name(prompt, sample),
            prompt_ids=prompt.prompt_ids,
            seed=draws.seed(prompt, sample),
        )
        for prompt, sample in numbered(prompts, samples)
    ]


def numbered(prompts: Sequence[Prompt], samples: int) -> Iterator[tuple[Prompt, int]]:
    """Each prompt with the numbers of its samples, from 0. A prompt that comes twice, as in a step that begins in
    one epoch and ends in the next, goes on counting."""
    asked: Counter[int] = Counter()
    for prompt in prompts:
        first = asked[prompt.index]
        asked[prompt.index] += samples
        yield from ((prompt, sample) for sample in range(first, first + samples))
