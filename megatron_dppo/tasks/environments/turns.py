"""The tokens between two turns of a policy: what closes its turn, what the environment says, what opens the next."""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedTokenizerBase

from megatron_dppo.errors import UserError
from megatron_dppo.tasks.config import TaskConfig
from megatron_dppo.tasks.prompting import encode_text, render, split_special

_MARK = "THE ASSISTANT SAID THIS"


class TurnEncoder:
    """Encodes observations for a conversation that is never tokenized twice: tokens of earlier turns stay the ones that
    were sampled, and the environment's are appended."""

    def __init__(self, config: TaskConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._chat, self._tokenizer, self._date = config.chat_template, tokenizer, config.date
        self._given = config.chat_template_kwargs

    def between(self, observation: str, last_sampled: int) -> np.ndarray:
        """Token ids int32 to put after a turn that ended with the token `last_sampled`.

        With a chat template: the end of the assistant's turn (without the token that closes it, where the policy wrote
        it itself), the observation as the user's turn, and the opening of the assistant's. Without: the observation
        between line breaks.
        """
        observation = split_special(self._tokenizer, observation)
        if not self._chat:
            return encode_text(self._tokenizer, f"\n{observation}\n", continues=True)
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": _MARK},
            {"role": "user", "content": observation},
        ]
        text = render(self._tokenizer, messages, date=self._date, given=self._given)
        _, mark, after = text.partition(_MARK)
        if not mark or _MARK in after:
            raise UserError(
                "the tokenizer's chat template does not show an assistant's message as it is, so a conversation cannot "
                "be continued; use another template or task.chat_template=false"
            )
        ids = encode_text(self._tokenizer, after, continues=True)
        return ids[1:] if len(ids) and ids[0] == last_sampled else ids
