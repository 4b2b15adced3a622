"""From per-token losses to the scalar that is differentiated, independent of how the batch is split.

Every mode is a weight per row, fixed before the forward pass from *global* denominators, so that

    loss of the mini-batch = sum over ranks and microbatches of `aggregate(per_token, weights)`

whatever the split into microbatches, packs, data-parallel ranks or context-parallel parts of one sequence.
No mean over a local subset is ever taken.
"""

from dataclasses import dataclass
from enum import StrEnum

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class Aggregation(StrEnum):
    """How token losses l_{i,t} of sequences i = 1..N combine; t runs over the n_i trainable tokens of i."""

    SEQ_MEAN_TOKEN_SUM_NORM = "seq-mean-token-sum-norm"
    """1/N sum_i (1/L) sum_t l, L a constant: Eq. 11 up to scale, without length bias (Dr. GRPO). The default."""
    SEQ_MEAN_TOKEN_SUM = "seq-mean-token-sum"
    """1/N sum_i sum_t l: Eq. 11."""
    SEQ_MEAN_TOKEN_MEAN = "seq-mean-token-mean"
    """1/N sum_i (1/n_i) sum_t l: GRPO as first published; long answers weigh less per token."""
    TOKEN_MEAN = "token-mean"
    """(1 / sum_i n_i) sum_i sum_t l: DAPO."""


@dataclass(frozen=True, kw_only=True)
class Denominators:
    """Counts over the whole mini-batch, all ranks and microbatches together."""

    tokens: int
    """Trainable tokens: rows of the loss mask that are set."""
    sequences: int
    """Sequences of the mini-batch, with trainable tokens or not."""
    constant: float = 1.0
    """L of `seq-mean-token-sum-norm`, in tokens: usually the longest response allowed."""

    def __post_init__(self) -> None:
        if self.tokens < 0 or self.sequences < 1 or not self.constant > 0:
            raise ValueError(
                f"denominators must satisfy tokens >= 0, sequences >= 1, constant > 0: tokens={self.tokens}, "
                f"sequences={self.sequences}, constant={self.constant}"
            )


def token_weights(
    loss_mask: Bool[Tensor, " T"],
    mode: Aggregation | str,
    denominators: Denominators,
    *,
    sequence_tokens: Int[Tensor, " T"] | None = None,
) -> Float[Tensor, " T"]:
    """Weight of each row's loss, float64 [T], exactly 0 where the loss mask excludes the row.

    `sequence_tokens` [T] is n_i of the row's sequence, counted over the whole sequence (all context-parallel
    ranks), and is needed by `seq-mean-token-mean` only. Raises ValueError where it is missing, or for an unknown mode.
    """
    mode = Aggregation(mode)
    trainable = loss_mask != 0
    weight = torch.ones(loss_mask.shape, dtype=torch.float64, device=loss_mask.device)
    if mode is Aggregation.TOKEN_MEAN:
        weight /= max(denominators.tokens, 1)
    elif mode is Aggregation.SEQ_MEAN_TOKEN_SUM:
        weight /= denominators.sequences
    elif mode is Aggregation.SEQ_MEAN_TOKEN_SUM_NORM:
        weight /= denominators.sequences * denominators.constant
    else:
        if sequence_tokens is None:
            raise ValueError("seq-mean-token-mean needs sequence_tokens: the trainable tokens of each row's sequence")
        weight /= denominators.sequences * torch.where(trainable, sequence_tokens, 1)
    return torch.where(trainable, weight, 0.0)


def aggregate(per_token: Float[Tensor, " T"], weights: Float[Tensor, " T"]) -> Float[Tensor, ""]:
    """sum_t weights_t * per_token_t over these rows: this microbatch's share of the mini-batch loss.

    Rows of weight 0 are left out by `where`, so that even NaN there reaches neither value nor gradient. Summed in
    float64, returned in the dtype of `per_token`. Gradient flows to `per_token`. No collective: the caller's
    gradient reduction must be a plain sum over ranks and microbatches.
    """
    kept = torch.where(weights != 0, per_token, 0.0)
    return (weights.to(torch.float64) * kept.to(torch.float64)).sum().to(per_token.dtype)
