"""Which rows a call computes, and the check of its ids."""

from __future__ import annotations

from jaxtyping import Bool, Int
from torch import Tensor


def rows_of_mask(loss_mask: Bool[Tensor, " T"] | None) -> Int[Tensor, " N"] | None:
    """Indices of the rows to compute, or None for all of them. With a mask this waits for the device."""
    if loss_mask is None:
        return None
    rows = loss_mask.nonzero().squeeze(1)
    return None if rows.shape[0] == loss_mask.shape[0] else rows


def check_ids(ids: Int[Tensor, "N I"], vocab_size: int) -> None:
    """Raise ``ValueError`` for an id outside ``[-1, vocab_size)``. Waits for the device."""
    if ids.numel() == 0:
        return
    low, high = (int(value) for value in ids.aminmax())
    if low < -1 or high >= vocab_size:
        raise ValueError(
            f"token_ids and topk_ids hold ids from {low} to {high}, outside [-1, {vocab_size}); ids are global and "
            "columns past the end padding: check that tokenizer and vocab_size belong together; -1 is an absent id"
        )


def take_rows(values: Tensor, rows: Int[Tensor, " N"] | None) -> Tensor:
    """``values[rows]``, without a copy where rows is None (all)."""
    return values if rows is None else values.index_select(0, rows)


def put_rows(values: Tensor, rows: Int[Tensor, " N"] | None, total: int) -> Tensor:
    """Put ``values [N, ...]`` at ``rows`` of zeros ``[total, ...]``; without a copy where rows is None (all)."""
    if rows is None:
        return values
    return values.new_zeros((total, *values.shape[1:])).index_copy_(0, rows, values)
