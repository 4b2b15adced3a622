"""Importance ratios of whole sequences: the geometric mean of the token ratios (GSPO), and their product."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

SequenceReduce = Callable[[Tensor], Tensor]
"""Sums a float64 [S, 2] tensor over the ranks that hold parts of the same sequences, and returns the sum."""


@torch.no_grad()
def sequence_log_ratio(
    log_ratio: Float[Tensor, " T"],
    loss_mask: Bool[Tensor, " T"],
    sequence_ids: Int[Tensor, " T"],
    *,
    mean: bool = True,
    num_sequences: int | None = None,
    reduce: SequenceReduce | None = None,
) -> Float[Tensor, " T"]:
    """sum_t log r_{i,t} of each row's sequence, with `mean` over |y_i|, float64 [T]; 0 on rows the loss mask excludes.

    The sum is over the trainable tokens of the *whole* sequence. Where context parallelism splits sequences, give
    `num_sequences` (equal on those ranks) and `reduce`, which sums the per-sequence totals over them; the collective
    is the caller's. Sequences must not be split in any other way (over microbatches). Raises ValueError if `reduce`
    comes without `num_sequences`. No gradient. Sources: GSPO, arXiv 2507.18071
    (mean); the ratio of a response in any importance sampling (sum).
    """
    if reduce is not None and num_sequences is None:
        raise ValueError("reduce needs num_sequences, so that every rank sums a tensor of the same shape")
    trainable = loss_mask != 0
    row = torch.where(trainable, sequence_ids, 0).long()
    if num_sequences is None:
        num_sequences = int(row.max()) + 1 if row.numel() else 0
    terms = torch.stack([torch.where(trainable, log_ratio, 0.0).double(), trainable.double()], dim=-1)
    totals = torch.zeros(num_sequences, 2, dtype=torch.float64, device=log_ratio.device).index_add_(0, row, terms)
    if reduce is not None:
        totals = reduce(totals)
    whole = totals[:, 0] / totals[:, 1].clamp(min=1.0) if mean else totals[:, 0]
    return torch.where(trainable, whole[row], 0.0)
