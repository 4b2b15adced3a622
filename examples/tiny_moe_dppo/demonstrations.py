"""Solved questions to learn from, by a demonstrator who may be careless."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from megatron_dppo.errors import UserError
from megatron_dppo.tasks.task import Prompt

_SLIPS = (-3, -2, -1, 1, 2, 3)


@dataclass(frozen=True)
class DemonstrationBatch:
    """`B` solved questions, padded on the right to `T` tokens."""

    token_ids: torch.Tensor
    """int64 `[B, T]`: prompt, answer, end-of-sequence token, padding."""
    is_answer: torch.Tensor
    """bool `[B, T]`: the answer and the end-of-sequence token, which are what is learned."""


class Demonstrator:
    """Shows training questions in shuffled order, epoch after epoch, with their answers.

    With probability `slip` an answer is off by one to three: a well-formed number, but a wrong one. Only tasks with
    whole-number answers can be shown so (UserError otherwise).
    """

    def __init__(self, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        self._solved = [(prompt, _whole_number(prompt)) for prompt in prompts]
        self._tokenizer = tokenizer
        self._random = random.Random(seed)
        self._left: list[int] = []

    def show(self, count: int, slip: float) -> DemonstrationBatch:
        rows: list[tuple[list[int], list[int]]] = []
        for _ in range(count):
            if not self._left:
                self._left = list(range(len(self._solved)))
                self._random.shuffle(self._left)
            prompt, answer = self._solved[self._left.pop()]
            if self._random.random() < slip:
                answer += self._random.choice(_SLIPS)
            written = self._tokenizer.encode(str(answer), add_special_tokens=False)
            rows.append((prompt.prompt_ids.tolist(), [*written, self._tokenizer.eos_token_id]))
        width = max(len(question) + len(answer) for question, answer in rows)
        token_ids = torch.full((count, width), self._tokenizer.pad_token_id, dtype=torch.long)
        is_answer = torch.zeros(count, width, dtype=torch.bool)
        for row, (question, written) in enumerate(rows):
            end = len(question) + len(written)
            token_ids[row, :end] = torch.tensor(question + written)
            is_answer[row, len(question) : end] = True
        return DemonstrationBatch(token_ids, is_answer)


def _whole_number(prompt: Prompt) -> int:
    try:
        return int(prompt.answer)
    except ValueError:
        raise UserError(
            f"the warm-up demonstrates whole numbers, but the answer to {prompt.question!r} is {prompt.answer!r}; "
            "choose a task with whole-number answers or make the model without warm-up"
        ) from None
