"""Which rows of a pack a context-parallel rank holds. Pure, no torch.distributed."""

from __future__ import annotations

import numpy as np


def sequence_multiple(size: int) -> int:
    """What the rows of every packed sequence must be a multiple of: `2 * size` chunks, or 1 without splitting."""
    return 2 * size if size > 1 else 1


def zigzag_rows(lengths: np.ndarray, rank: int, size: int) -> np.ndarray:
    """Rows of a pack that context-parallel rank `rank` of `size` holds, int64 `[lengths.sum() / size]`, in its order.

    lengths: rows of each packed sequence, multiples of `sequence_multiple(size)`

    Every sequence is cut into `2 * size` equal chunks; rank `r` holds chunks `r` and `2 * size - 1 - r`, so that causal
    attention costs every rank the same. This is the order in which TransformerEngine's packed (THD) attention and
    Megatron-Core's rotary embedding expect a rank's rows. Raises ValueError on a length that cannot be cut.
    """
    multiple = sequence_multiple(size)
    if (np.asarray(lengths) % multiple).any():
        raise ValueError(
            f"packed sequences of {list(lengths)} rows cannot be split over {size} context-parallel ranks: "
            f"pad each to a multiple of {multiple}"
        )
    if size == 1:
        return np.arange(int(np.sum(lengths)), dtype=np.int64)
    rows, start = [], 0
    for length in (int(n) for n in lengths):
        chunk = length // multiple
        firsts = (start + rank * chunk, start + (multiple - 1 - rank) * chunk)
        rows += [np.arange(first, first + chunk) for first in firsts]
        start += length
    return np.concatenate(rows).astype(np.int64)
