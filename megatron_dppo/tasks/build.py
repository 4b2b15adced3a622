"""From a configuration to a task."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from megatron_dppo.tasks.config import TaskConfig
from megatron_dppo.tasks.reasoning_gym import ReasoningGymTask
from megatron_dppo.tasks.task import Task


def build_task(config: TaskConfig, tokenizer: PreTrainedTokenizerBase) -> Task:
    """The task that `config` describes, its prompts encoded by `tokenizer`. Raises UserError for a name or parameter
    that does not exist."""
    # `config.kind` is a closed choice, checked on loading; further families dispatch here.
    return ReasoningGymTask(config, tokenizer)
