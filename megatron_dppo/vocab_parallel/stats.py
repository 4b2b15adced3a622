"""The op's result, and the merge of per-shard statistics it is made of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class TokenStats:
    """Per-token statistics of the policy, identical to the bit on every rank of the tensor-parallel group.

    Floating dtype is float32 (float64 for float64 inputs). Rows that were not computed (``loss_mask`` 0 or token id
    ``-1``) hold 0, so that a product with a mask stays finite, and get no gradient.
    """

    logp: Float[Tensor, " T"]
    """``log pi(token)``, never above 0. Carries gradients."""
    entropy: Float[Tensor, " T"] | None
    """``-sum_j p_j log p_j`` in nats; None where it was not asked for. Carries gradients."""
    topk_logp: Float[Tensor, "T K"] | None
    """``log pi`` of each row's own ids; ``-inf`` where the id is ``-1``. No gradient. None without ``topk_ids``."""


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
    d: Float[Tensor, " N"] | None
    """``sum_j (z_j - m) exp(z_j - m)``; None where no entropy is asked for."""
    z: Float[Tensor, "N I"]
    """Logits of the wanted ids (column 0 is the token, the rest its top-K); ``-inf`` for an id outside the slice."""

    def pack(self) -> Float[Tensor, "C N"]:
        """One contiguous buffer for one collective: ``4 (2 + 1 + 1 + K)`` bytes a token in float32."""
        rows = [self.m, self.s] if self.d is None else [self.m, self.s, self.d]
        return torch.cat([torch.stack(rows), self.z.t()])

    @staticmethod
    def unpack(buffer: Float[Tensor, "C N"], entropy: bool) -> Partials:
        """Inverse of :meth:`pack`."""
        scalars = 3 if entropy else 2
        return Partials(buffer[0], buffer[1], buffer[2] if entropy else None, buffer[scalars:].t())


def merge(a: Partials, b: Partials) -> Partials:
    """Statistics of the union of two disjoint slices; associative up to rounding, so callers fix the order.

    ``M = max(m_a, m_b)``; ``S = sum_i s_i e^(m_i - M)``; ``D = sum_i e^(m_i - M) (d_i + (m_i - M) s_i)``.
    """
    m = torch.maximum(a.m, b.m)
    # Against an empty slice the shift would be -inf: 0 * (-inf) is NaN, so its term is left out.
    shift_a, shift_b = ((p.m - m).masked_fill(p.m == -torch.inf, 0.0) for p in (a, b))
    w_a, w_b = shift_a.exp(), shift_b.exp()
    d = None
    if a.d is not None and b.d is not None:
        d = w_a * (a.d + shift_a * a.s) + w_b * (b.d + shift_b * b.s)
    return Partials(m, w_a * a.s + w_b * b.s, d, torch.maximum(a.z, b.z))


def finish(total: Partials) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"] | None, Float[Tensor, "N I"]]:
    """Normaliser, entropy and log-probabilities from the statistics of the whole vocabulary.

    ``lse = M + ln S``; ``entropy = ln S - D / S``; ``log p_i = z_i - lse``, held at or below 0 against rounding.
    """
    log_s = total.s.log()
    lse = total.m + log_s
    entropy = None if total.d is None else log_s - total.d / total.s
    return lse, entropy, (total.z - lse[:, None]).clamp(max=0.0)
