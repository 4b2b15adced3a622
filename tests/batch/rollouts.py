"""Random rollout batches, as an engine could return them."""

from __future__ import annotations

import numpy as np

from megatron_dppo.batch import RolloutBatch
from megatron_dppo.router_replay.routes import Routes

VOCAB, EXPERTS, LAYERS, TOPK = 29, 6, 3, 2


def random_batch(seed: int, prompts: list[int], responses: list[int], top_k: int, routes: bool = True) -> RolloutBatch:
    """Sequences of the given prompt and response lengths; tokens are drawn from random softmaxes over VOCAB ids."""
    rng = np.random.default_rng(seed)
    lengths = np.array(prompts) + np.array(responses)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = int(offsets[-1])
    place = np.arange(tokens) - np.repeat(offsets[:-1], lengths)
    sampled = place >= np.repeat(prompts, lengths)
    token_ids = rng.integers(0, VOCAB, tokens).astype(np.int32)
    logits = rng.normal(size=(tokens, VOCAB)) * 2
    logp = (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))).astype(np.float32)
    best = np.argsort(-logp, axis=1)[:, :top_k]
    experts = np.stack(
        [rng.permuted(np.tile(np.arange(EXPERTS), (tokens, 1)), axis=1)[:, :TOPK] for _ in range(LAYERS)], axis=1
    ).astype(np.uint8)
    valid = np.ones(tokens, dtype=bool)
    valid[offsets[1:] - 1] = False
    experts[~valid] = 0
    return RolloutBatch(
        token_ids=token_ids,
        offsets=offsets,
        prompt_lengths=np.array(prompts, dtype=np.int32),
        loss_mask=sampled,
        mu_logp=np.where(sampled, logp[np.arange(tokens), token_ids], 0).astype(np.float32),
        topk_ids=np.where(sampled[:, None], best, -1).astype(np.int32),
        topk_logp=np.where(sampled[:, None], np.take_along_axis(logp, best, axis=1), -np.inf).astype(np.float32),
        routes=Routes(experts, valid, EXPERTS) if routes else None,
        request_ids=tuple(f"{seed}/{i}/0" for i in range(len(lengths))),
        finish_reasons=("stop",) * len(lengths),
        weight_versions=np.zeros(tokens, dtype=np.int32),
    )
