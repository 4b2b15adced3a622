"""From a question to the token ids the engine gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from megatron_dppo.errors import UserError
from megatron_dppo.tasks.config import TaskConfig

Messages = Sequence[Mapping[str, str]]


def user_message(config: TaskConfig, question: str, metadata: Mapping[str, Any]) -> str:
    """Fill `config.prompt`. Raises UserError where the template asks for what the dataset does not give."""
    try:
        return config.prompt.format(question=question, metadata=metadata)
    except (KeyError, IndexError, AttributeError, ValueError) as error:
        known = ", ".join(sorted(metadata))
        raise UserError(
            f"task.prompt={config.prompt!r} cannot be filled ({type(error).__name__}: {error}); it may use "
            f"{{question}} and {{metadata[...]}} with {known}"
        ) from error


def with_system_prompt(config: TaskConfig, messages: Messages) -> list[dict[str, str]]:
    """`messages`, after the system prompt of the configuration; it replaces one that they bring along."""
    if config.system_prompt is None:
        return [dict(message) for message in messages]
    rest = messages[1:] if messages and messages[0]["role"] == "system" else messages
    return [{"role": "system", "content": config.system_prompt}, *(dict(message) for message in rest)]


def encode_prompt(
    config: TaskConfig, tokenizer: PreTrainedTokenizerBase, messages: str | Messages
) -> tuple[np.ndarray, str]:
    """`(ids [tokens] int32, the text they spell)` of a user message, or of messages that end with the user's, up to
    where the response starts. Without chat template the contents are lines of plain text."""
    given = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    complete = with_system_prompt(config, given)
    if not config.chat_template:
        text = "\n".join(message["content"] for message in complete)
        return np.asarray(tokenizer.encode(text), dtype=np.int32), text
    if tokenizer.chat_template is None:
        raise UserError(
            f"task.chat_template is true, but the tokenizer of {tokenizer.name_or_path or 'the model'} has no chat "
            "template; set task.chat_template=false or use a model that has one"
        )
    text = tokenizer.apply_chat_template(complete, tokenize=False, add_generation_prompt=True)
    # The template writes whatever special tokens belong in front, so the tokenizer must not add its own.
    return np.asarray(tokenizer.encode(text, add_special_tokens=False), dtype=np.int32), text
