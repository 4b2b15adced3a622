"""What transformers says of tokens that another engine sampled: one forward of each whole sequence, no keys kept."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedModel

from megatron_dppo.batch import RolloutBatch
from megatron_dppo.rollout.reference.routes import RouteRecorder
from megatron_dppo.router_replay.record import RouteSchema, record_routes


@torch.no_grad()
def score(
    model: PreTrainedModel,
    recorder: RouteRecorder | None,
    schema: RouteSchema | None,
    batch: RolloutBatch,
    temperature: float,
) -> RolloutBatch:
    """`batch` with this model's `mu_logp` of its sampled tokens and `topk_logp` of its ids, of softmax(logits /
    temperature), and with this model's routes."""
    mu_logp, topk_logp, experts = batch.mu_logp.copy(), batch.topk_logp.copy(), []
    for number in range(len(batch)):
        start, stop = int(batch.offsets[number]), int(batch.offsets[number + 1])
        ids = torch.from_numpy(batch.token_ids[start:stop].astype(np.int64)).to(model.device)
        first = int(batch.prompt_lengths[number])
        logits = model(input_ids=ids[None, :-1], logits_to_keep=len(ids) - first, use_cache=False).logits[0]
        logp = (logits.float() / temperature).log_softmax(dim=-1)
        rows = slice(start + first, stop)
        mu_logp[rows] = logp.gather(1, ids[first:, None])[:, 0].cpu().numpy()
        asked = torch.from_numpy(batch.topk_ids[rows].astype(np.int64)).to(model.device)
        found = logp.gather(1, asked.clamp_min(0)).cpu().numpy()
        topk_logp[rows] = np.where(batch.topk_ids[rows] < 0, topk_logp[rows], found)
        if recorder is not None and schema is not None:
            experts.append(recorder.in_all_layers(1, len(ids) - 1, schema)[0])
    mu_logp[~batch.loss_mask] = 0.0  # what an environment wrote
    routes = None
    if schema is not None:
        routes = record_routes(experts, batch.lengths, schema, batch.request_ids).routed_under(batch.weight_versions)
    return replace(batch, mu_logp=mu_logp, topk_logp=topk_logp, routes=routes)
