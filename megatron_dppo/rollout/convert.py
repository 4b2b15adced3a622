"""From vLLM's outputs to a `RolloutBatch`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from megatron_dppo.batch import RolloutBatch
from megatron_dppo.rollout.protocol import GenerationRequest
from megatron_dppo.router_replay.record import RouteSchema, record_routes

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput


class MalformedOutput(RuntimeError):
    """The engine answered with something other than what was asked for."""


def to_batch(
    requests: Sequence[GenerationRequest],
    outputs: Sequence[RequestOutput],
    *,
    recorded: int,
    top_k: int,
    schema: RouteSchema | None,
    weight_version: int,
) -> RolloutBatch:
    """All outputs, in the order of the requests, as flat arrays.

    recorded        K the engine was asked for (top_k bounded by the vocabulary)
    top_k           columns of the batch; those past `recorded` are absent
    schema          layer pattern whose routes are checked and recorded; None drops routes
    weight_version  version that sampled all of it

    vLLM's flat log-probabilities hold `recorded + 1` entries per token: the sampled token, then the likeliest ids in
    rank order (which may repeat the sampled one).
    """
    prompts = [np.asarray(r.prompt_ids, dtype=np.int32) for r in requests]
    completions = [o.outputs[0] for o in outputs]
    responses = [np.asarray(c.token_ids, dtype=np.int32) for c in completions]
    prompt_lengths = np.array([len(p) for p in prompts], dtype=np.int32)
    response_lengths = np.array([len(r) for r in responses], dtype=np.int64)
    lengths = prompt_lengths + response_lengths
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)

    token_ids = np.concatenate([part for pair in zip(prompts, responses, strict=True) for part in pair])
    # A row is sampled if its place in the sequence is past the prompt.
    place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    loss_mask = place >= np.repeat(prompt_lengths, lengths)

    ids, logp = _flat_logprobs(requests, outputs, response_lengths, recorded)
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
    routes = None
    if schema is not None:
        routes = record_routes([c.routed_experts for c in completions], lengths, schema, request_ids)
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
        finish_reasons=tuple(str(c.finish_reason) for c in completions),
        weight_versions=np.full(len(token_ids), weight_version, dtype=np.int32),
    )


def _flat_logprobs(
    requests: Sequence[GenerationRequest], outputs: Sequence[RequestOutput], tokens: np.ndarray, recorded: int
) -> tuple[np.ndarray, np.ndarray]:
    """Ids int64 and log-probabilities float32 `[sampled tokens, recorded + 1]`, the sampled token first."""
    width = recorded + 1
    ids, values = [], []
    for request, output, count in zip(requests, outputs, tokens.tolist(), strict=True):
        if output.request_id != request.request_id:
            raise MalformedOutput(f"asked for {request.request_id}, the engine answered {output.request_id}")
        flat = output.outputs[0].logprobs
        if count == 0 or flat is None or len(flat.token_ids) != count * width:
            raise MalformedOutput(
                f"request {request.request_id}: {count} tokens with "
                f"{0 if flat is None else len(flat.token_ids)} log-probabilities, expected {width} for each token"
            )
        ids.append(np.asarray(flat.token_ids, dtype=np.int64))
        values.append(np.asarray(flat.logprobs, dtype=np.float32))
    return np.concatenate(ids).reshape(-1, width), np.concatenate(values).reshape(-1, width)
