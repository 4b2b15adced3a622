"""Replies in the forms of OpenAI's chat completions and of vLLM's generation from ids."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_dppo.agents import MODEL
from megatron_dppo.agents.asked import Asked
from megatron_dppo.agents.messages import Message, call_object
from megatron_dppo.batch import RolloutBatch


@dataclass(frozen=True)
class Answered:
    """A turn that was sampled: session's name, number, all ids before it, one sequence that ends with it, and what was
    asked."""

    session: str
    number: int
    prompt: np.ndarray
    batch: RolloutBatch
    asked: Asked

    @property
    def finish_reason(self) -> str:
        return self.batch.finish_reasons[0]

    @property
    def usage(self) -> dict[str, int]:
        prompt, sampled = len(self.prompt), len(self.batch.response_ids(0))
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def chat_reply(answered: Answered, answer: Message, spell: Callable[[int], str]) -> dict[str, Any]:
    """A chat completion. `spell` is the text of one token."""
    calls = [call_object(call.id, call.name, call.arguments) for call in answer.tool_calls]
    reasoning = answer.reasoning or None
    content = answer.content or (None if calls else "")
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    message |= {"reasoning_content": reasoning, "reasoning": reasoning}
    if calls:
        message["tool_calls"] = calls
    reason = "tool_calls" if calls and answered.finish_reason == "stop" else answered.finish_reason
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
    asked, batch = answered.asked, answered.batch
    if asked.logprobs is not None:
        choice["logprobs"] = {"content": _logprobs(batch, asked.logprobs, spell), "refusal": None}
    reply = {
        "id": f"chatcmpl-{answered.session}/{answered.number}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [choice],
        "usage": answered.usage,
    }
    if asked.token_ids:
        reply["prompt_token_ids"] = answered.prompt.tolist()
        choice["token_ids"] = batch.response_ids(0).tolist()
    return reply


def ids_reply(answered: Answered) -> dict[str, Any]:
    """What vLLM's `/inference/v1/generate` answers; routes stay here, in the session's record."""
    asked, batch = answered.asked, answered.batch
    told = None
    if asked.logprobs is not None:
        told = {"content": _logprobs(batch, asked.logprobs, lambda one: f"token_id:{one}")}
    ids = batch.response_ids(0).tolist()
    choice = {"index": 0, "token_ids": ids, "logprobs": told, "finish_reason": answered.finish_reason}
    return {
        "request_id": f"{answered.session}/{answered.number}",
        "choices": [choice],
        "usage": answered.usage,
    }


def events(reply: dict[str, Any], *, usage: bool) -> Iterator[bytes]:
    """A finished chat completion as server-sent events: clients put calls in pieces together in ways of their own, so
    each is whole in one."""
    (choice,) = reply["choices"]
    common = {k: reply[k] for k in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    message = choice["message"]
    delta = {k: v for k, v in message.items() if k != "tool_calls"}
    if calls := message.get("tool_calls"):
        delta["tool_calls"] = [{"index": number} | call for number, call in enumerate(calls)]
    said = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": choice["logprobs"]}
    said |= {k: choice[k] for k in ("token_ids",) if k in choice}
    last = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"], "logprobs": None}
    prompt = {k: reply[k] for k in ("prompt_token_ids",) if k in reply}
    pieces = [common | {"choices": [said]} | prompt, common | {"choices": [last]}]
    if usage:
        pieces.append(common | {"choices": [], "usage": reply["usage"]})
    for piece in pieces:
        yield b"data: " + json.dumps(piece).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


def _logprobs(batch: RolloutBatch, top: int, spell: Callable[[int], str]) -> list[dict[str, Any]]:
    def one(token: int, logp: float) -> dict[str, Any]:
        text = spell(token)
        return {"token": text, "logprob": logp, "bytes": list(text.encode("utf-8", "replace"))}

    told = []
    for row in np.flatnonzero(np.arange(len(batch.token_ids)) >= batch.prompt_lengths[0]):
        likeliest = zip(batch.topk_ids[row][:top].tolist(), batch.topk_logp[row][:top].tolist(), strict=True)
        told.append(
            one(int(batch.token_ids[row]), float(batch.mu_logp[row]))
            | {"top_logprobs": [one(token, logp) for token, logp in likeliest if token >= 0]}
        )
    return told
