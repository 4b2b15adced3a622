"""The op's result, and the merge of per-shard statistics it is made of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class TokenStats:
    """Per-token statistics of the policy, identical to the bit on every rank of the tensor-parallel group.

    Floating dtype is float32 (float64 for float64 inputs). Rows that do not count (``loss_mask`` 0 or token id ``-1``)
    hold 0, so that a product with a mask stays finite, and get no gradient.
    """

    logp: Float[Tensor, " T"]
    """``log pi(token)``, never above 0. Carries gradients."""
    entropy: Float[Tensor, " T"]
    """``-sum_j p_j log p_j`` in nats. Carries gradients."""
    topk_logp: Float[Tensor, "T K"] | None
    """``log pi`` of each row's own ids; ``-inf`` where the id is ``-1``. Carries gradients. None without
    ``topk_ids``."""


@dataclass(frozen=True)
class Partials:
    """Statistics of one slice of the vocabulary, for N rows, with ``z = logits / temperature``.

    The weighted sum is taken about the maximum, so that the entropy keeps its digits where logits are far from 0.
    An empty slice has ``m = -inf, s = d = 0``.
    """

    m: Float[Tensor, " N"]
    """``max_j z_j``"""
    s: Float[Tensor, " N"]
    """``sum_j exp(z_j - m)``"""
    d: Float[Tensor, " N"]
    """``sum_j (z_j - m) exp(z_j - m)``"""
    z: Float[Tensor, "N I"]
    """Logits of the wanted ids (column 0 is the token, the rest its top-K); ``-inf`` for an id outside the slice."""

    def pack(self) -> Float[Tensor, "C N"]:
        """One contiguous buffer for one collective: ``4 (2 + 1 + 1 + K)`` bytes a token in float32."""
        return torch.cat([torch.stack([self.m, self.s, self.d]), self.z.t()])

    @staticmethod
    def unpack(buffer: Float[Tensor, "R C N"]) -> Partials:
        """Inverse of :meth:`pack` for a stack of buffers: fields get a leading dimension of slices."""
        return Partials(buffer[:, 0], buffer[:, 1], buffer[:, 2], buffer[:, 3:].transpose(1, 2))


def concatenate(blocks: list[Partials]) -> Partials:
    """Statistics of consecutive blocks of rows, as one."""
    if len(blocks) == 1:
        return blocks[0]
    return Partials(
        torch.cat([block.m for block in blocks]),
        torch.cat([block.s for block in blocks]),
        torch.cat([block.d for block in blocks]),
        torch.cat([block.z for block in blocks]),
    )


def merge(slices: Partials) -> Partials:
    """Statistics of the union of disjoint slices, which are stacked along a leading dimension, in that order.

    ``M = max m_i``; ``S = sum_i s_i e^(m_i - M)``; ``D = sum_i e^(m_i - M) (d_i + (m_i - M) s_i)``.
    """
    m = slices.m.amax(0)
    # An empty slice's shift would be -inf: 0 * (-inf) is NaN, so its term is left out.
    shift = (slices.m - m).masked_fill(slices.m == -torch.inf, 0.0)
    weight = shift.exp()
    d = (weight * (slices.d + shift * slices.s)).sum(0)
    return Partials(m, (weight * slices.s).sum(0), d, slices.z.amax(0))


def merge_two(a: Partials, b: Partials) -> Partials:
    """:func:`merge` of two slices."""
    return merge(Partials(*(torch.stack(both) for both in ((a.m, b.m), (a.s, b.s), (a.d, b.d), (a.z, b.z)))))


def finish(total: Partials) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"], Float[Tensor, "N I"]]:
    """Normaliser, entropy and log-probabilities from the statistics of the whole vocabulary.

    ``lse = M + ln S``; ``entropy = ln S - D / S``; ``log p_i = (z_i - M) - ln S``, held at or below 0 against rounding.
    In that order a near-certain token (``z_i = M``) keeps all the digits of ``ln S``.
    """
    log_s = total.s.log()
    return total.m + log_s, log_s - total.d / total.s, ((total.z - total.m[:, None]) - log_s[:, None]).clamp(max=0.0)
