"""From a core's answers to a `RolloutBatch`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_dppo.batch import RolloutBatch, join_turns
from megatron_dppo.rollout.engine import GenerationRequest, MalformedOutput
from megatron_dppo.rollout.serving.core import Answer
from megatron_dppo.router_replay.record import RouteSchema, record_routes


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

    ids, logp = np.concatenate([a.ids for a in answers]), np.concatenate([a.logp for a in answers])
    if not np.array_equal(ids[:, 0], token_ids[loss_mask]):
        raise MalformedOutput("the engine's log-probabilities do not belong to the tokens it returned")
    if not np.isfinite(logp[:, 0]).all():
        row = int(np.flatnonzero(~np.isfinite(logp[:, 0]))[0])
        raise MalformedOutput(
            f"log mu of a sampled token is {logp[row, 0]} (token {ids[row, 0]}); the engine's forward is not finite"
        )
    mu_logp = np.zeros(len(token_ids), dtype=np.float32)
    mu_logp[loss_mask] = logp[:, 0]
    topk_ids = np.full((len(token_ids), top_k), -1, dtype=np.int32)
    topk_logp = np.full((len(token_ids), top_k), -np.inf, dtype=np.float32)
    topk_ids[loss_mask, :recorded] = ids[:, 1:]
    topk_logp[loss_mask, :recorded] = logp[:, 1:]

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
        turns = [batch.select([first + number]) for number in range(count)]
        reason = turns[-1].finish_reasons[0]
        joined.append(join_turns(turns, request_id=request.request_id, finish_reason=reason, latest_prompt=True))
        first += count
    return RolloutBatch.concatenate(joined)


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
