"""Requests through a core, each in one part or, where a weight sync cut it, in several."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_dppo.batch import RolloutBatch, join_turns
from megatron_dppo.rollout.engine import GenerationRequest, GenerationTimeout, MalformedOutput, SamplingConfig
from megatron_dppo.rollout.seeds import continued_seed
from megatron_dppo.rollout.serving.core import Answer, Core
from megatron_dppo.rollout.serving.weight_updates import Gate
from megatron_dppo.router_replay.record import RouteSchema, record_routes
from megatron_dppo.router_replay.routes import Routes


@dataclass(frozen=True)
class Part:
    """What one stretch of sampling under one version of the weights gave."""

    request: GenerationRequest
    """Whose prompt is everything before this part."""
    answer: Answer
    version: int
    """Of the weights that sampled it."""


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


def to_batch(
    requests: Sequence[GenerationRequest],
    answers: Sequence[Answer],
    *,
    recorded: int,
    top_k: int,
    schema: RouteSchema | None,
    weight_versions: Sequence[int],
) -> RolloutBatch:
    """All answers, in the order of the requests, as flat arrays.

    recorded        K the engine was asked for (top_k bounded by the vocabulary)
    top_k           columns of the batch; those past `recorded` are absent
    schema          layer pattern whose routes are checked and recorded; None drops routes
    weight_versions version that sampled each answer

    Each answer has `recorded + 1` columns: the sampled token, then the likeliest ids in rank order (which may repeat
    the sampled one). Raises `MalformedOutput`, and `RouteError` for routes that cannot be.
    """
    # Where each sequence lies, and what of it was sampled.
    prompts = [np.asarray(r.prompt_ids, dtype=np.int32) for r in requests]
    _check(requests, answers, recorded)
    responses = [answer.token_ids for answer in answers]
    prompt_lengths = np.array([len(p) for p in prompts], dtype=np.int32)
    response_lengths = np.array([len(r) for r in responses], dtype=np.int64)
    lengths = prompt_lengths + response_lengths
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)

    token_ids = np.concatenate([part for pair in zip(prompts, responses, strict=True) for part in pair])
    # A row is sampled if its place in the sequence is past the prompt.
    place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    loss_mask = place >= np.repeat(prompt_lengths, lengths)

    # The record of the sampled rows.
    ids, logp = np.concatenate([a.ids for a in answers]), np.concatenate([a.logp for a in answers])
    if not np.array_equal(ids[:, 0], token_ids[loss_mask]):
        raise MalformedOutput("the engine's log-probabilities do not belong to the tokens it returned")
    if not np.isfinite(logp[:, 0]).all():
        row = int(np.flatnonzero(~np.isfinite(logp[:, 0]))[0])
        raise MalformedOutput(
            f"log mu of a sampled token is {logp[row, 0]} (token {ids[row, 0]}): the engine's forward is not finite; "
            "where every engine says so the weights have diverged (optimizer.lr)"
        )
    mu_logp = np.zeros(len(token_ids), dtype=np.float32)
    mu_logp[loss_mask] = logp[:, 0]
    topk_ids = np.full((len(token_ids), top_k), -1, dtype=np.int32)
    topk_logp = np.full((len(token_ids), top_k), -np.inf, dtype=np.float32)
    topk_ids[loss_mask, :recorded] = ids[:, 1:]
    topk_logp[loss_mask, :recorded] = logp[:, 1:]

    # Routes, of all rows.
    request_ids = tuple(r.request_id for r in requests)
    versions = np.repeat(np.asarray(weight_versions, dtype=np.int32), lengths)
    routes = None
    if schema is not None:
        routes = record_routes([a.experts for a in answers], lengths, schema, request_ids)
        routes = routes.routed_under(versions)
    return RolloutBatch(
        token_ids=token_ids,
        offsets=offsets,
        prompt_lengths=prompt_lengths,
        loss_mask=loss_mask,
        mu_logp=mu_logp,
        topk_ids=topk_ids,
        topk_logp=topk_logp,
        routes=routes,
        request_ids=request_ids,
        finish_reasons=tuple(a.finish_reason for a in answers),
        weight_versions=versions,
    )


def join_parts(requests: Sequence[GenerationRequest], parts: Sequence[int], batch: RolloutBatch) -> RolloutBatch:
    """One sequence per request and by its name, from the parts of all of them in `batch`; `parts` is how many each has.

    A part goes by another name where a sync came before: also the only one, of a request that was cut before its first
    token.
    """
    if max(parts) == 1:
        return replace(batch, request_ids=tuple(request.request_id for request in requests))
    joined, first = [], 0
    for request, count in zip(requests, parts, strict=True):
        whole = [batch.select([first + number]) for number in range(count)]
        known = [0, *(len(part.token_ids) for part in whole)]
        turns = [part.beyond([before]) for part, before in zip(whole, known, strict=False)]
        reason = turns[-1].finish_reasons[0]
        one = join_turns(turns, request_id=request.request_id, finish_reason=reason)
        joined.append(_with_prompt_of(whole[-1], one))
        first += count
    return RolloutBatch.concatenate(joined)


def _with_prompt_of(last: RolloutBatch, joined: RolloutBatch) -> RolloutBatch:
    """The prompt as the last part's prefill saw it: its version, and its routes but those of its last token, whose
    forward sampled."""
    prompt, routes = int(joined.prompt_lengths[0]), joined.routes
    versions = np.concatenate([last.weight_versions[:prompt], joined.weight_versions[prompt:]])
    if routes is not None and last.routes is not None:
        routes = Routes.concatenate([last.routes.between(0, prompt - 1), routes.between(prompt - 1, len(routes))])
    return replace(joined, weight_versions=versions, routes=routes)


def _check(requests: Sequence[GenerationRequest], answers: Sequence[Answer], recorded: int) -> None:
    """Raise `MalformedOutput` for answers to something else, and records of other sizes than the tokens that came."""
    for request, answer in zip(requests, answers, strict=True):
        if answer.request_id != request.request_id:
            raise MalformedOutput(f"asked for {request.request_id}, the engine answered {answer.request_id}")
        count = len(answer.token_ids)
        if count == 0 or not answer.ids.shape == answer.logp.shape == (count, recorded + 1):
            raise MalformedOutput(
                f"request {request.request_id}: {count} tokens with log-probabilities {answer.ids.shape}, "
                f"expected {recorded + 1} for each token"
            )
