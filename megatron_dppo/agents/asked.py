"""What a request asks for, and whether its tokens would be drawn as the trainer recomputes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megatron_dppo.agents.messages import Refused
from megatron_dppo.rollout.engine import SamplingConfig
from megatron_dppo.tasks.prompting import APPLIED

OtherSampling = Literal["refuse", "not_trained"]

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_k": (0, -1), "min_p": (0,), "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,),
    "min_tokens": (0,), "ignore_eos": (False,), "logit_bias": ({},), "bad_words": ([],), "allowed_token_ids": (),
    "logits_processors": ([],), "structured_outputs": (), "guided_json": (), "guided_regex": (), "guided_choice": (),
    "guided_grammar": (), "response_format": ({"type": "text"},), "tool_choice": ("auto", "none"),
    "use_beam_search": (False,), "functions": ([],), "truncate_prompt_tokens": (), "continue_final_message": (False,),
    "add_generation_prompt": (True,), "echo": (False,), "best_of": (1,), "prompt_logprobs": (),
}  # fmt: skip
"""Fields that change what is drawn from, or what is asked at all, with the values (besides null) that do not. A run's
engines do none of it."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request, read."""

    sampling: SamplingConfig
    """The session's, with the temperature and top-p of the request."""
    max_tokens: int | None
    """None: as many as the session's limits allow."""
    stop: tuple[str, ...]
    """Texts that end the answer."""
    why_not: str
    """Why the answer is not to be trained on; empty for one that is."""
    logprobs: int | None = None
    """Likeliest tokens to tell beside every sampled one; None tells no log-probabilities."""
    token_ids: bool = False
    """Whether the reply has the ids."""
    stream: bool = False
    usage: bool = False
    """Whether the last piece of a stream tells the tokens."""
    given: dict[str, Any] = field(default_factory=dict)
    """Further variables of the chat template."""
    tools: Any = None
    one_call: bool = False
    """Whether the harness takes one call of a tool at a time."""


def read_chat(
    body: Mapping[str, Any], session: SamplingConfig, other_sampling: OtherSampling, *, vocab_size: int
) -> Asked:
    """Of a body of chat completions. Raises `Refused` with the field."""
    asked = _read(body, session, other_sampling, vocab_size)
    given = dict(_of(body, "chat_template_kwargs", dict, "an object") or {})
    if own := sorted(given.keys() & (APPLIED | {"tools"})):
        raise Refused(
            400,
            f"chat_template_kwargs has {own[0]}, which is no variable of it; leave it out",
            param="chat_template_kwargs",
        )
    if effort := _of(body, "reasoning_effort", str, "text"):
        given.setdefault("reasoning_effort", effort)
    tools = _of(body, "tools", list, "a list") or None
    options = _of(body, "stream_options", dict, "an object") or {}
    top = _whole(body, "top_logprobs", 0) or 0
    return replace(
        asked,
        logprobs=top if body.get("logprobs") else None,
        token_ids=bool(body.get("return_token_ids")),
        stream=bool(body.get("stream")),
        usage=bool(options.get("include_usage")),
        given=given,
        tools=None if body.get("tool_choice") == "none" else tools,
        one_call=body.get("parallel_tool_calls") is False,
    )


def read_ids(
    body: Mapping[str, Any], session: SamplingConfig, other_sampling: OtherSampling, *, vocab_size: int
) -> tuple[list[int], Asked]:
    """The ids and the rest of a body of `/inference/v1/generate`. Raises `Refused` with the field."""
    ids = body.get("token_ids")
    if not isinstance(ids, list) or not ids or not all(_is_id(one, 1 << 31) for one in ids):
        raise Refused(400, "token_ids must be a list of ids", param="token_ids")
    if body.get("stream"):
        raise Refused(400, "stream: answers in ids are not streamed", param="stream")
    for name in ("features", "content_parts"):
        if body.get(name):
            raise Refused(400, f"{name}: sessions know text alone", param=name)
    parameters = _of(body, "sampling_params", dict, "an object") or {}
    asked = _read(parameters, session, other_sampling, vocab_size)
    return ids, replace(asked, logprobs=_whole(parameters, "logprobs", 0), token_ids=True)


def _read(body: Mapping[str, Any], session: SamplingConfig, other_sampling: OtherSampling, vocab_size: int) -> Asked:
    if body.get("n") not in (None, 1):
        raise Refused(400, "n must be 1: a session is one conversation", param="n")
    for name, neutral in _NEUTRAL.items():
        value = body.get(name)
        if value is not None and value not in neutral:
            raise Refused(400, f"{name}={value!r:.60} changes what tokens are drawn from; leave it out", param=name)
    drawn = {name: _number(body, name) for name in ("temperature", "top_p")}
    changed = {n: v for n, v in drawn.items() if v is not None and not math.isclose(v, getattr(session, n))}
    why_not = ", ".join(f"{name}={value:g} (the session's is {getattr(session, name):g})"
                        for name, value in changed.items())  # fmt: skip
    if why_not and other_sampling == "refuse":
        raise Refused(400, f"{why_not}: the answer could not be trained on; leave it out", param=next(iter(changed)))
    if not 0 <= changed.get("temperature", 1.0) <= 2 or not 0 < changed.get("top_p", 1.0) <= 1:
        raise Refused(400, f"{why_not}: no such distribution", param=next(iter(changed)))
    limits = [_whole(body, name, 1) for name in ("max_completion_tokens", "max_tokens")]
    stops = _of(body, "stop_token_ids", list, "a list") or []
    if not all(_is_id(one, vocab_size) for one in stops):
        raise Refused(400, f"stop_token_ids must be ids from 0 to {vocab_size - 1}", param="stop_token_ids")
    sampling = replace(
        session,
        stop_token_ids=tuple(sorted({*session.stop_token_ids, *stops})),
        temperature=changed.get("temperature", session.temperature),
        top_p=changed.get("top_p", session.top_p),
    )
    return Asked(
        sampling=sampling,
        max_tokens=min((one for one in limits if one is not None), default=None),
        stop=_stop(body.get("stop")),
        why_not=why_not,
    )


def _stop(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value or []
    if not isinstance(texts, list) or len(texts) > 64 or not all(isinstance(one, str) and one for one in texts):
        raise Refused(400, "stop must be a text, or a list of at most 64 texts, none empty", param="stop")
    return tuple(texts)


def _is_id(value: Any, vocab_size: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size


def _of(body: Mapping[str, Any], name: str, kind: type, said: str) -> Any:
    value = body.get(name)
    if value is not None and not isinstance(value, kind):
        raise Refused(400, f"{name} must be {said}", param=name)
    return value


def _number(body: Mapping[str, Any], name: str) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    try:
        if not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    except OverflowError:  # JSON has integers of any length
        pass
    raise Refused(400, f"{name} must be a number", param=name)


def _whole(body: Mapping[str, Any], name: str, least: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise Refused(400, f"{name} must be a whole number of at least {least}", param=name)
    return int(value)
