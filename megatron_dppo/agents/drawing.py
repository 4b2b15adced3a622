"""An answer from the engines, also one that a text is to end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from megatron_dppo.batch import RolloutBatch, join_turns
from megatron_dppo.rollout.engine import GenerationRequest, SamplingConfig
from megatron_dppo.rollout.seeds import continued_seed

type Sample = Callable[[GenerationRequest, SamplingConfig, bool], RolloutBatch]
"""`Generates.generate` of one sequence, for training or not. Blocks; is called from many threads."""

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
    parts: list[RolloutBatch] = []
    left, now, kept = sampling.max_tokens, request, 0
    while True:
        piece = min(PIECE, left) if len(now.prompt_ids) + PIECE <= most_prompt else left
        part = sample(now, replace(sampling, max_tokens=piece), training)
        parts.append(part)
        left -= int(part.response_lengths[0])
        ids = np.concatenate([one.response_ids(0) for one in parts])
        if any(one in spell(ids) for one in stop):
            kept = _first_with(ids, stop, spell)
        if kept or part.finish_reasons[0] != "length" or left < 1:
            break
        so_far = np.concatenate([request.prompt_ids, ids])
        name, seed = f"{request.request_id}.{len(parts)}", continued_seed(request.seed, _OWN_SEEDS + len(parts))
        now = replace(request, request_id=name, prompt_ids=so_far, seed=seed, known=len(so_far))
    whole = join_turns(parts, request_id=request.request_id, finish_reason="stop" if kept else part.finish_reasons[0])
    if not 0 < kept < len(ids):
        return whole
    rows = np.arange(int(whole.prompt_lengths[0]) + kept)
    return whole.take(rows, offsets=np.array([0, len(rows)], dtype=np.int64))


def _first_with(ids: np.ndarray, stop: Sequence[str], spell: Callable[[np.ndarray], str]) -> int:
    """The least number of ids whose text has one of the texts: they have it from there on."""
    low, high = 1, len(ids)
    while low < high:
        middle = (low + high) // 2
        text = spell(ids[:middle])
        low, high = (low, middle) if any(one in text for one in stop) else (middle + 1, high)
    return low
