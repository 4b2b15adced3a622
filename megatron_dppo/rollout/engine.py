"""What the trainer may ask of a rollout engine, whatever stands behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from megatron_dppo.batch import RolloutBatch
from megatron_dppo.errors import UserError
from megatron_dppo.rollout.config import RolloutConfig


@dataclass(frozen=True, kw_only=True)
class SamplingLaw:
    """How tokens are drawn. Training needs the engine's law to be the model's own at `temperature` (`log mu` is then
    exactly what the trainer recomputes), so truncations of the law are accepted for evaluation only."""

    temperature: float = 1.0
    """Divides the logits; 0 is greedy (evaluation only)."""
    max_tokens: int = 1024
    """Most tokens sampled per request; a response cut there ends with finish reason "length"."""
    top_k_logprobs: int = 0
    """K: likeliest ids recorded per sampled token."""
    top_p: float = 1.0
    """Nucleus; must be 1 for training."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a response, beside the model's end-of-sequence token. The stop token is part of the response."""


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One sequence to sample. `request_id` is unique within a run; `seed` derives from (run, step, prompt, sample)."""

    request_id: str
    prompt_ids: np.ndarray = field(repr=False)
    seed: int


class RolloutEngine(Protocol):
    """A vLLM engine, a Ray actor that holds one, or a fleet of them. Used by one controller at a time."""

    def generate(self, requests: Sequence[GenerationRequest], law: SamplingLaw, *, training: bool) -> RolloutBatch:
        """Sample every request; the batch has the requests' order. `training=True` refuses laws that are not the
        model's own and records top-K and routes; otherwise only tokens and `log mu` are needed."""
        ...

    def sleep(self) -> None: ...

    def wake(self, what: Literal["weights", "kv_cache"]) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def close(self) -> None: ...


def check_requests(requests: Sequence[GenerationRequest], law: SamplingLaw, config: RolloutConfig) -> None:
    """Raise `UserError` for requests that an engine of `config` cannot answer."""
    if not requests:
        raise UserError("generate was called without requests")
    if len({r.request_id for r in requests}) != len(requests):
        raise UserError("generate was called with the same request_id twice")
    if law.max_tokens < 1:
        raise UserError(f"max_tokens={law.max_tokens}: a response has at least one token")
    for request in requests:
        length = len(request.prompt_ids)
        if length == 0 or length > config.max_prompt_tokens:
            raise UserError(
                f"request {request.request_id}: the prompt has {length} tokens, "
                f"rollout.max_prompt_tokens allows 1 to {config.max_prompt_tokens}"
            )
        if length + law.max_tokens > config.max_model_len:
            raise UserError(
                f"request {request.request_id}: {length} prompt tokens and max_tokens={law.max_tokens} exceed "
                f"rollout.max_prompt_tokens + rollout.max_response_tokens = {config.max_model_len}"
            )


class EngineClosed(RuntimeError):
    """The engine was closed, or its gate is shut after a weight sync that did not finish."""


class EngineDead(RuntimeError):
    """The engine's core process ended or hung. Nothing can be asked of it any more; the reason is in its log."""


class GenerationTimeout(TimeoutError):
    """A request took longer than `rollout.request_timeout_s`; it was aborted with the others of its call."""


class EnginesFailed(UserError):
    """Engines failed more often in this run than `rollout.max_engine_failures` allows."""


class MalformedOutput(RuntimeError):
    """The engine answered with something other than what was asked for."""
