"""From a question to the token ids the engine gets."""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from megatron_dppo.errors import UserError
from megatron_dppo.tasks.config import TaskConfig


def user_message(config: TaskConfig, question: str, metadata: dict[str, Any]) -> str:
    """Fill `config.prompt`. Raises UserError where the template asks for what the dataset does not give."""
    try:
        return config.prompt.format(question=question, metadata=metadata)
    except (KeyError, IndexError, AttributeError, ValueError) as error:
        known = ", ".join(sorted(metadata))
        raise UserError(
            f"task.prompt={config.prompt!r} cannot be filled ({type(error).__name__}: {error}); it may use "
            f"{{question}} and {{metadata[...]}} with {known}"
        ) from error


def encode_prompt(config: TaskConfig, tokenizer: PreTrainedTokenizerBase, message: str) -> tuple[np.ndarray, str]:
    """`(ids [tokens] int32, the text they spell)` of one user message, up to where the response starts."""
    if not config.chat_template:
        text = message if config.system_prompt is None else f"{config.system_prompt}\n{message}"
        return np.asarray(tokenizer.encode(text), dtype=np.int32), text
    if tokenizer.chat_template is None:
        raise UserError(
            f"task.chat_template is true, but the tokenizer of {tokenizer.name_or_path or 'the model'} has no chat "
            "template; set task.chat_template=false or use a model that has one"
        )
    messages = [{"role": "user", "content": message}]
    if config.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    # The template writes whatever special tokens belong in front, so the tokenizer must not add its own.
    return np.asarray(tokenizer.encode(text, add_special_tokens=False), dtype=np.int32), text
