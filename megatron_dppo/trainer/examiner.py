"""A task with the tokenizer that reads what the model wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from megatron_dppo.tasks.task import Prompt, Rewards, Task


@dataclass(frozen=True)
class Examiner:
    """Only the controller has one: prompts and verdicts are made once."""

    task: Task
    tokenizer: PreTrainedTokenizerBase

    def score(self, prompts: Sequence[Prompt], samples: int, responses: Sequence[np.ndarray]) -> Rewards:
        """The verdicts on the token ids of `samples` answers to each prompt in turn."""
        texts = self.tokenizer.batch_decode(list(responses), skip_special_tokens=True)
        return self.task.score([prompt for prompt in prompts for _ in range(samples)], texts)
