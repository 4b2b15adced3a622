"""Which rows a call computes, and the checks of its ids."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def active_rows(
    token_ids: Int[Tensor, " T"],
    topk_ids: Int[Tensor, "T K"] | None,
    loss_mask: Bool[Tensor, " T"] | None,
    vocab_size: int,
) -> Int[Tensor, " N"] | None:
    """Indices of the rows to compute, or None for all of them.

    A row counts where ``loss_mask`` is non-zero and its token id is not ``-1``.

    Raises ``ValueError`` for an id outside ``[-1, vocab_size)``, in whatever row. Waits for the device: the number of
    rows is needed on the host.
    """
    if token_ids.numel() == 0:
        return None
    active = token_ids != -1
    if loss_mask is not None:
        active &= loss_mask != 0
    named = {"token_ids": token_ids} | ({"topk_ids": topk_ids} if topk_ids is not None and topk_ids.numel() else {})
    # Few launches and one copy to the host: the device idles meanwhile.
    extremes = [value for ids in named.values() for value in ids.aminmax()]
    count, *limits = torch.stack([active.sum().to(token_ids.dtype), *extremes]).tolist()
    for name, low, high in zip(named, limits[::2], limits[1::2], strict=True):
        if low < -1 or high >= vocab_size:
            raise ValueError(
                f"{name} holds ids from {low} to {high}, outside [-1, {vocab_size}); ids are global and columns past "
                "the end are padding: check that the tokenizer and vocab_size belong together; -1 is an absent id"
            )
    return None if count == token_ids.numel() else active.nonzero().squeeze(1)


def take_rows(values: Tensor, rows: Int[Tensor, " N"] | None) -> Tensor:
    """``values[rows]``, without a copy where rows is None (all)."""
    return values if rows is None else values.index_select(0, rows)


def put_rows(values: Tensor, rows: Int[Tensor, " N"] | None, total: int) -> Tensor:
    """Put ``values [N, ...]`` at ``rows`` of zeros ``[total, ...]``; without a copy where rows is None (all)."""
    if rows is None:
        return values
    return values.new_zeros((total, *values.shape[1:])).index_copy_(0, rows, values)
