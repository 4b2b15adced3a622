"""What the trainer may ask of a rollout engine, whatever stands behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from megatron_dppo.batch import RolloutBatch


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
