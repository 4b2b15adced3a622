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

    A row counts where ``loss_mask`` is non-zero and its token id is not ``-1``. Ids of other rows are not looked at.

    Raises ``ValueError`` for an id of a counted row outside the vocabulary (``-1`` is allowed in ``topk_ids``).
    Copies from device to host, once or twice: the number of rows is needed there.
    """
    active = token_ids != -1
    if loss_mask is not None:
        active &= loss_mask != 0
    bad_token = (((token_ids < 0) | (token_ids >= vocab_size)) & active).any()
    bad_topk = bad_token.new_zeros(())
    if topk_ids is not None and topk_ids.numel():
        bad_topk = (((topk_ids < -1) | (topk_ids >= vocab_size)).any(1) & active).any()
    count, token_fault, topk_fault = torch.stack([active.sum(), bad_token, bad_topk]).tolist()
    for fault, name, low in ((token_fault, "token_ids", 0), (topk_fault, "topk_ids", -1)):
        if fault:
            raise ValueError(
                f"{name} holds an id outside [{low}, {vocab_size}); ids are global and columns past the end are "
                "padding: check that the tokenizer and vocab_size belong together, and use -1 for an absent id"
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
