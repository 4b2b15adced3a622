"""A task with the tokenizer that reads what the model wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from megatron_dppo.batch import RolloutBatch
from megatron_dppo.tasks.task import Prompt, Rewards, Task


@dataclass(frozen=True)
class Examiner:
    """Only the controller has one: prompts and verdicts are made once."""

    task: Task
    tokenizer: PreTrainedTokenizerBase

    def score(self, prompts: Sequence[Prompt], samples: int, batch: RolloutBatch) -> Rewards:
        """The verdicts on `batch`, which holds `samples` answers to each prompt in turn."""
        texts = self.tokenizer.batch_decode(
            [batch.response_ids(i) for i in range(len(batch))], skip_special_tokens=True
        )
        return self.task.score([prompt for prompt in prompts for _ in range(samples)], texts)
