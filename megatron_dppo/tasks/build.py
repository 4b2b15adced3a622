"""From a configuration to a task."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from megatron_dppo.tasks.config import TaskConfig
from megatron_dppo.tasks.data_task import data_task
from megatron_dppo.tasks.environments.environment_task import EnvironmentTask
from megatron_dppo.tasks.prompt_set import PromptSet
from megatron_dppo.tasks.reasoning_gym import reasoning_gym_task


def build_task(
    config: TaskConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_tokens: int = 1024,
    max_response_tokens: int = 16384,
) -> PromptSet:
    """The task that `config` describes, its prompts encoded by `tokenizer`; the limits are those of the rollout. Raises
    UserError for a name or parameter that does not exist, and for data that cannot be used."""
    if config.environment is not None:
        return EnvironmentTask(config, tokenizer, max_prompt_tokens=max_prompt_tokens)
    make = reasoning_gym_task if config.data is None else data_task
    return make(config, tokenizer, max_prompt_tokens=max_prompt_tokens, max_response_tokens=max_response_tokens)
