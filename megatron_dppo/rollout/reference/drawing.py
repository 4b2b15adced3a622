"""Drawing tokens from logits, as the engine's record says they were drawn."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_GREEDY = 1e-5
"""Temperatures below take the likeliest token."""


def draw(
    logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor, generators: Sequence[torch.Generator | None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens int64 `[B]`, and log-probabilities float32 `[B, V]` of the distribution that each was drawn from.

    That is softmax(logits / temperature), cut to the nucleus where `top_p` < 1 (the likeliest tokens that together
    reach it, at least one; what is cut has -inf); greedy rows have softmax(logits). A token is the argmax of
    log p - log q, q ~ Exp(1) from the row's generator, which is a draw from p; a difference in the last bits of the
    logits changes it no more often than it moves that maximum. vLLM draws so too, on a CPU with the same noise. Rows
    without a generator are greedy.
    """
    logits = logits.float()
    greedy = temperature < _GREEDY
    scaled = logits / torch.where(greedy, 1.0, temperature)[:, None]
    nucleus = (top_p < 1) & ~greedy
    if bool(nucleus.any()):
        scaled[nucleus] = _cut(scaled[nucleus], top_p[nucleus])
    logp = scaled.log_softmax(dim=-1)
    keys = logp.double()
    for row, generator in enumerate(generators):
        if generator is not None:
            keys[row] -= torch.empty_like(keys[row]).exponential_(generator=generator).log_()
    return keys.argmax(dim=-1), logp


def _cut(scaled: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    ordered, ids = scaled.sort(dim=-1)
    below = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p[:, None]
    below[:, -1] = False
    return torch.empty_like(scaled).scatter_(-1, ids, ordered.masked_fill(below, -torch.inf))
