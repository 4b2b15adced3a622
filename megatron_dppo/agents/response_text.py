"""Responses as rewards and environments read them: the thinking between tags, whatever the model writes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from megatron_dppo.agents.parsing import END_THINK, HARMONY, THINK, read_channels
from megatron_dppo.tasks.rewards.final_answer import behind_thinking, is_thinking_tag


def response_texts(tokenizer: PreTrainedTokenizerBase, responses: Sequence[np.ndarray]) -> list[str]:
    """The texts of sampled token ids, without special tokens. Tags around the thinking stay, also where the tokenizer
    calls them special; what gpt-oss writes on its channel of analysis stands between such tags."""
    added = tokenizer.added_tokens_decoder
    channels = {"<|channel|>", "<|message|>"} <= {token.content for token in added.values()}
    kept = {
        n for n, token in added.items() if is_thinking_tag(token.content) or (channels and token.content in HARMONY)
    }
    special = {n for n, token in added.items() if token.special} | set(tokenizer.all_special_ids)
    hidden = np.array(sorted(special - kept), dtype=np.int64)
    texts = tokenizer.batch_decode([ids[~np.isin(ids, hidden)] for ids in responses], skip_special_tokens=False)
    return [_tagged(text) for text in texts] if channels else texts


def said_aloud(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray]
) -> list[str]:
    """What stands behind the thinking of each response, which a chat template may begin at the end of the prompt."""
    begun = [tokenizer.decode(ids[-16:]).rstrip().endswith(THINK) for ids in prompts]
    texts = response_texts(tokenizer, responses)
    return [behind_thinking(THINK * inside + text) for inside, text in zip(begun, texts, strict=True)]


def _tagged(text: str) -> str:
    parsed = read_channels(text)
    return f"{THINK}\n{parsed.reasoning}\n{END_THINK}\n{parsed.content}" if parsed.reasoning else parsed.content
