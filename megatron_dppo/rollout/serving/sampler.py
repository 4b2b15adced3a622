"""Requests through a core, each in one part or, where a weight sync cut it, in several."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_dppo.rollout.engine import GenerationRequest, GenerationTimeout, SamplingConfig
from megatron_dppo.rollout.seeds import continued_seed
from megatron_dppo.rollout.serving.core import Answer, Core
from megatron_dppo.rollout.serving.gate import Gate


@dataclass(frozen=True)
class Part:
    """What one stretch of sampling under one version of the weights gave.

    request  whose prompt is everything before this part
    version  of the weights that sampled it
    """

    request: GenerationRequest
    answer: Answer
    version: int


class Sampler:
    """Runs on the engine's event loop."""

    def __init__(self, core: Core, gate: Gate, *, timeout_s: float) -> None:
        self._core, self._gate, self._timeout = core, gate, timeout_s
        self._calls: dict[str, asyncio.Task[list[list[Part]]]] = {}
        self.ended: dict[str, int] = {}
        """Tokens of the responses of each call under way that have ended."""

    async def sample(
        self, requests: Sequence[GenerationRequest], sampling: SamplingConfig, *, call: str
    ) -> list[list[Part]]:
        """The parts of every request, in order. `call` names this call to `abandon`. Raises `GenerationTimeout` for a
        request that is not whole after `timeout_s`; the others are then given up too."""
        tasks = [asyncio.ensure_future(self._one(r, sampling, call)) for r in requests]
        together = asyncio.ensure_future(_all(tasks))
        self._calls[call], self.ended[call] = together, 0
        try:
            return await together
        finally:
            del self._calls[call], self.ended[call]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def abandon(self, call: str) -> None:
        """Give the requests of a call up; it raises `CancelledError`. Nothing happens where it has ended."""
        if call in self._calls:
            self._calls[call].cancel()

    async def _one(self, request: GenerationRequest, sampling: SamplingConfig, call: str) -> list[Part]:
        try:
            async with asyncio.timeout(self._timeout):
                parts = await self._parts(request, sampling)
        except TimeoutError as error:
            raise GenerationTimeout(
                f"request {request.request_id} had not ended after rollout.request_timeout_s={self._timeout:g}"
            ) from error
        self.ended[call] += sum(len(part.answer.token_ids) for part in parts)
        return parts

    async def _parts(self, request: GenerationRequest, sampling: SamplingConfig) -> list[Part]:
        """Until the response ends by itself or has all its tokens. After a cut it goes on as a request whose prompt is
        what there is: the keys and values of older weights are never mixed with new ones."""
        parts: list[Part] = []
        now, left, tries = request, sampling.max_tokens, 0
        while True:
            await self._gate.passable()
            with self._gate.inside() as version:
                answer = await self._core.draw(now, replace(sampling, max_tokens=left))
            tries += 1
            ids, reason = answer.token_ids, answer.finish_reason
            if reason == "abort":  # cut before its first token
                now = replace(now, request_id=f"{request.request_id}~{tries}")
                continue
            parts.append(Part(now, answer, version))
            if reason != "length" or not 0 < len(ids) < left:
                return parts
            left -= len(ids)
            now = GenerationRequest(
                request_id=f"{request.request_id}~{tries}",
                prompt_ids=np.concatenate([now.prompt_ids, np.asarray(ids, dtype=np.int32)]),
                seed=continued_seed(request.seed, len(parts)),
            )


async def _all(tasks: Sequence[asyncio.Task[list[Part]]]) -> list[list[Part]]:
    return list(await asyncio.gather(*tasks))
