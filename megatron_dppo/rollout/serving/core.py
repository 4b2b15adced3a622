"""The core of an engine: what samples and holds the weights. All else of an engine is the same for every kind.

The trainer recomputes `log pi` as the log-softmax of logits / temperature over the whole vocabulary. `log mu` is
comparable only if the engine drew from the same distribution, so anything else that moves or removes probability is
refused for training (paper, Section 4; top-p or penalties would enter the ratio pi / mu as if the policy had changed).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from megatron_dppo.checkpoint.weight_layout import Bucket
from megatron_dppo.errors import UserError
from megatron_dppo.rollout.engine import GenerationRequest, SamplingConfig, TransferTerms, WorkerReport
from megatron_dppo.router_replay.record import RouteSchema


@dataclass(frozen=True)
class Answer:
    """What a core sampled for one request, and what it recorded of the `G` tokens."""

    request_id: str
    """Of the request."""
    token_ids: np.ndarray
    """int32 `[G]`"""
    finish_reason: str
    """One of "stop", "length", or "abort" where a sync cut it before its first token (`G` is 0 then)."""
    ids: np.ndarray
    """int32 `[G, 1 + K]`, the sampled token, then the likeliest ids in rank order."""
    logp: np.ndarray
    """float32 `[G, 1 + K]`, their log-probabilities in the distribution that the token was drawn from."""
    experts: np.ndarray | None
    """`[prompt + G - 1, layers, k]` of an integer type; None where routes are not recorded."""


@dataclass(frozen=True)
class WorkerSync:
    """What one worker says of the sync that it finished: checksums by bucket, and its measures."""

    checksums: Mapping[int, int]
    report: WorkerReport


class Core(Protocol):
    """Coroutines of the engine's event loop. The engine sees to it that those of weights come one after another, while
    nothing is drawn. Each raises `EngineDead` where the core is gone."""

    @property
    def routes(self) -> RouteSchema | None:
        """What its record of experts looks like; None where it has none."""
        ...

    async def draw(self, request: GenerationRequest, sampling: SamplingConfig) -> Answer:
        """Sample one request to its end, or to where `hold` cuts it. `sampling` has all stop ids and the K that the
        vocabulary allows. Cancelled, it leaves nothing behind."""
        ...

    async def turn(self) -> None:
        """Return between two steps."""
        ...

    async def hold(self, *, cut: bool) -> None:
        """Take no step until `resume`. `cut` ends what is under way after the token it is at, with finish reason
        "length", or "abort" where it has none."""
        ...

    async def pause(self) -> None:
        """Freeze what is under way where it is, until `resume`."""
        ...

    async def resume(self) -> None: ...

    async def sleep(self) -> None:
        """Give memory of weights and of the KV cache back."""
        ...

    async def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        """Allocate it again."""
        ...

    async def agree(self, terms: TransferTerms) -> None:
        """See `RolloutEngine.agree`; the layouts were checked."""
        ...

    async def start_update(self) -> None:
        """Open an update."""
        ...

    async def load(self, version: int, what: Bucket | Literal["shared", "group"]) -> None:
        """Load a bucket that came with the call, or all of the layouts: out of the shared buffers, or from the
        communicator."""
        ...

    async def finish_update(self, version: int) -> list[WorkerSync]:
        """All came: the core has the weights of `version`, and no keys and values of others. Raises `IncompleteSync`
        for what the model lacks now."""
        ...

    async def abandon_update(self, version: int) -> None:
        """Drop what came since `start_update`."""
        ...

    async def close(self) -> None:
        """End it, and its processes."""
        ...


LOWEST_TEMPERATURE = 0.01
"""vLLM silently raises positive temperatures to this."""


def refuse_other_distributions(sampling: SamplingConfig) -> None:
    """Raise `UserError` unless tokens drawn so follow softmax(logits / temperature) and nothing else."""
    if sampling.temperature < LOWEST_TEMPERATURE:
        raise UserError(
            f"temperature={sampling.temperature} cannot be used for training rollouts: "
            f"log mu of a greedy draw is not the policy's; use at least {LOWEST_TEMPERATURE}"
        )
    if sampling.top_p != 1:
        raise UserError(
            f"top_p={sampling.top_p} changes the sampling distribution and cannot be used for training rollouts: the "
            "recorded log mu would not be the policy's; leave it at 1 (evaluation may use it)"
        )
