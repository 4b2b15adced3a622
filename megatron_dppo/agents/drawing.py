"""An answer from the engines, also one that a text is to end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from megatron_dppo.batch import RolloutBatch, join_turns
from megatron_dppo.rollout.engine import GenerationRequest, SamplingConfig
from megatron_dppo.rollout.seeds import continued_seed

type Sample = Callable[[GenerationRequest, SamplingConfig, bool], RolloutBatch]
"""Samples one sequence, for training or not. Blocks; is called from many threads; raises as `Generates.generate`."""

PIECE = 256
"""Tokens that are sampled before the text is looked at, where a text ends the answer."""

_OWN_SEEDS = 1 << 20
"""Pieces have seeds from here on; those before are of the parts in which an engine samples one."""


def draw(
    sample: Sample,
    request: GenerationRequest,
    sampling: SamplingConfig,
    *,
    training: bool,
    most_prompt: int,
    stop: Sequence[str] = (),
    spell: Callable[[np.ndarray], str] | None = None,
) -> RolloutBatch:
    """The answer to a request. With `stop` it ends with the token in which one of the texts is whole, with finish
    reason "stop". Engines know stop tokens alone: tokens are sampled by the piece, each a request whose prompt is all
    before it, with a seed of its own, and those behind the text are dropped. What is kept is drawn as ever, since no
    token depends on those behind it. `spell` is the text of ids; `most_prompt` are the tokens that engines take as a
    prompt: the last piece is as long as it must be."""
    if not stop or spell is None:
        return sample(request, sampling, training)
    whole: RolloutBatch | None = None
    left, now, number = sampling.max_tokens, request, 0
    while True:
        piece = min(PIECE, left) if len(now.prompt_ids) + PIECE <= most_prompt else left
        part = sample(now, replace(sampling, max_tokens=piece), training)
        parts = [part] if whole is None else [whole, part]
        whole = join_turns(parts, request_id=request.request_id, finish_reason=part.finish_reasons[0])
        left -= int(part.response_lengths[0])
        ids = whole.response_ids(0)
        if any(one in spell(ids) for one in stop):
            kept = _first_with(ids, stop, spell)
            return whole if kept == len(ids) and whole.finish_reasons[0] == "stop" else _cut(whole, kept)
        if part.finish_reasons[0] != "length" or left < 1:
            return whole
        number += 1
        seed = continued_seed(request.seed, _OWN_SEEDS + number)
        now = replace(request, request_id=f"{request.request_id}.{number}", prompt_ids=whole.token_ids, seed=seed)


def _first_with(ids: np.ndarray, stop: Sequence[str], spell: Callable[[np.ndarray], str]) -> int:
    """The least number of ids whose text has one of the texts: they have it from there on."""
    low, high = 1, len(ids)
    while low < high:
        middle = (low + high) // 2
        text = spell(ids[:middle])
        low, high = (low, middle) if any(one in text for one in stop) else (middle + 1, high)
    return low


def _cut(batch: RolloutBatch, kept: int) -> RolloutBatch:
    """The first `kept` sampled tokens of one sequence."""
    rows = np.arange(int(batch.prompt_lengths[0]) + kept)
    return RolloutBatch(
        token_ids=batch.token_ids[rows],
        offsets=np.array([0, len(rows)], dtype=np.int64),
        prompt_lengths=batch.prompt_lengths,
        loss_mask=batch.loss_mask[rows],
        mu_logp=batch.mu_logp[rows],
        topk_ids=batch.topk_ids[rows],
        topk_logp=batch.topk_logp[rows],
        routes=None if batch.routes is None else batch.routes.take(rows),
        request_ids=batch.request_ids,
        finish_reasons=("stop",),
        weight_versions=batch.weight_versions[rows],
    )
