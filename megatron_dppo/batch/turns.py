"""One sequence from the turns of an episode, each of which was sampled after everything before it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_dppo.batch.rollout_batch import RolloutBatch
from megatron_dppo.router_replay.routes import Routes


def join_turns(
    turns: Sequence[RolloutBatch], *, request_id: str, finish_reason: str, latest_prompt: bool = False
) -> RolloutBatch:
    """The whole episode as one sequence of a `RolloutBatch`.

    turns  batches of one sequence each; the prompt of a turn is all tokens of the turn before it, then what the
           environment said

    Of every sampled token `mu_logp`, the top K and the weight version are those of the turn that sampled it; all other
    tokens have an empty record and are out of the loss mask. The route of a token is that of the first forward that
    routed it: of the turn that sampled it, and for the last token of a turn and the environment's tokens, which that
    turn never fed to the model, of the next turn's prefill. The very last token has none. `latest_prompt` takes the
    routes and the version of the first turn's prompt from the last turn's prefill, except those of its last token,
    whose forward sampled (a response that was cut and went on under new weights).

    Raises ValueError where a turn does not begin with the turn before it.
    """
    last = turns[-1]
    tokens = len(last.token_ids)
    loss_mask = np.zeros(tokens, dtype=np.bool_)
    mu_logp = np.zeros(tokens, dtype=np.float32)
    topk_ids = np.full((tokens, last.top_k), -1, dtype=np.int32)
    topk_logp = np.full((tokens, last.top_k), -np.inf, dtype=np.float32)
    versions = np.zeros(tokens, dtype=np.int32)
    routed_by = np.zeros(tokens, dtype=np.int64)
    experts = None if last.routes is None else np.zeros_like(last.routes.experts)
    valid = np.zeros(tokens, dtype=np.bool_)

    # Every turn brings what it sampled, and the routes of what it was the first to feed to the model.
    before = last.token_ids[:0]
    for number, turn in enumerate(turns):
        length, given = len(turn.token_ids), int(turn.prompt_lengths[0])
        done = len(before)
        if len(turn) != 1 or given < done or not np.array_equal(turn.token_ids[:done], before):
            raise ValueError(
                f"{request_id}: turn {number} does not begin with the {done} tokens of the turns before it"
            )
        sampled = slice(given, length)
        loss_mask[sampled] = turn.loss_mask[sampled]
        mu_logp[sampled] = turn.mu_logp[sampled]
        topk_ids[sampled], topk_logp[sampled] = turn.topk_ids[sampled], turn.topk_logp[sampled]
        versions[done:length] = turn.weight_versions[done:length]
        if experts is not None and turn.routes is not None:
            routed = slice(max(done - 1, 0), length)
            experts[routed], valid[routed] = turn.routes.experts[routed], turn.routes.valid[routed]
            routed_by[routed] = turn.routes.weight_versions[routed]
        before = turn.token_ids

    # The prompt of a response that was cut, as its last part saw it.
    if latest_prompt:
        prompt = slice(0, int(turns[0].prompt_lengths[0]))
        versions[prompt] = last.weight_versions[prompt]
        if experts is not None and last.routes is not None:
            prefilled = slice(0, prompt.stop - 1)
            experts[prefilled], valid[prefilled] = last.routes.experts[prefilled], last.routes.valid[prefilled]
            routed_by[prefilled] = last.routes.weight_versions[prefilled]
    routes = None
    if experts is not None and last.routes is not None:
        routes = Routes(experts, valid, last.routes.num_experts).routed_under(routed_by)
    return RolloutBatch(
        token_ids=last.token_ids,
        offsets=np.array([0, tokens], dtype=np.int64),
        prompt_lengths=turns[0].prompt_lengths,
        loss_mask=loss_mask,
        mu_logp=mu_logp,
        topk_ids=topk_ids,
        topk_logp=topk_logp,
        routes=routes,
        request_ids=(request_id,),
        finish_reasons=(finish_reason,),
        weight_versions=versions,
    )
