"""One sequence from the turns of an episode, each of which was sampled after everything before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from megatron_dppo.batch.rollout_batch import BY_TOKEN, RolloutBatch
from megatron_dppo.router_replay.routes import Routes


def join_turns(turns: Sequence[RolloutBatch], *, request_id: str, finish_reason: str) -> RolloutBatch:
    """The whole episode as one sequence of a `RolloutBatch`.

    turns  batches of one sequence each; all but the first begin with the last token of the turn before it, then what
           the environment said (`RolloutBatch.beyond` cuts them so)

    Of every sampled token `mu_logp`, the top K and the weight version are those of the turn that sampled it; all other
    tokens have an empty record and are out of the loss mask. The route of a token is that of the first forward that
    routed it: of the turn that sampled it, and for the last token of a turn and the environment's tokens, which that
    turn never fed to the model, of the next turn's prefill. The very last token has none.

    Raises ValueError where a turn does not begin with the last token before it.
    """
    for number, (before, turn) in enumerate(pairwise(turns), start=1):
        if len(turn) != 1 or turn.token_ids[0] != before.token_ids[-1] or turn.prompt_lengths[0] < 1:
            raise ValueError(f"{request_id}: turn {number} does not begin with the last token of the turn before it")
    routes = [turn.routes for turn in turns if turn.routes is not None]
    if routes and len(routes) < len(turns):
        raise ValueError(f"{request_id}: some turns carry routes and some do not")
    # The token that two turns have is the earlier one's, but for its route.
    first, *others = turns
    joined = {
        name: np.concatenate([getattr(first, name), *(getattr(turn, name)[1:] for turn in others)]) for name in BY_TOKEN
    }
    fed = [*(part.between(0, len(part) - 1) for part in routes[:-1]), *routes[-1:]]
    return replace(
        first,
        **joined,
        offsets=np.array([0, len(joined["token_ids"])], dtype=np.int64),
        routes=Routes.concatenate(fed) if fed else None,
        request_ids=(request_id,),
        finish_reasons=(finish_reason,),
    )
