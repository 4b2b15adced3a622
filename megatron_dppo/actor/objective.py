"""The policy objective of one mini-batch, as the loss of its microbatches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.actor.microbatch import Microbatch, RowTensors
from megatron_dppo.actor.signal import AdvantageAt
from megatron_dppo.algorithm import (
    Denominators,
    KLEstimator,
    Preset,
    ReferenceKL,
    TokenMetrics,
    aggregate,
    divergence_for,
    kl_of_sampled,
    kl_of_topk,
    masked_token_counts,
    policy_loss,
    token_weights,
)
from megatron_dppo.vocab_parallel.stats import TokenStats


@dataclass(frozen=True)
class Recomputed:
    """Statistics of one microbatch, `S` rows, of a policy that does not change in the update: the trainer's own before
    it, the reference, or mu."""

    logp: Tensor
    topk_logp: Tensor | None


@dataclass(frozen=True)
class Blocked:
    """What the trust region blocked in one microbatch."""

    counts: Tensor
    """int64 `[2, V]`, see `masked_token_counts`."""
    rows: Tensor
    """int64 `[n, 3]`: sequence, position, and 1 where it was blocked, of the trained rows of watched sequences."""


@dataclass(frozen=True)
class MicrobatchReport:
    """What the last stage keeps of one microbatch."""

    loss: Tensor
    metrics: TokenMetrics
    nonfinite: tuple[Tensor, Tensor, Tensor]
    """(row is not finite `[S]`, sequence `[S]`, position `[S]`) to name the tokens of a non-finite loss."""
    blocked: Blocked | None
    """None where nobody asked."""


@dataclass(frozen=True)
class MiniBatchObjective:
    """Everything the loss of a microbatch depends on besides its rows; equal on all ranks."""

    preset: Preset
    denominators: Denominators
    advantages: Tensor
    returns: Tensor
    trained: Tensor
    """`[B]` over the source's sequences: A of each, and the trained tokens of its episode."""
    recomputed: list[Recomputed] | None
    """Per microbatch, for presets with a recomputed anchor."""
    reference: list[Recomputed] | None = None
    """The reference's statistics per microbatch, for a KL in the loss."""
    reference_kl: ReferenceKL | None = None
    context_group: dist.ProcessGroup | None = None
    """Ranks that hold parts of the same sequences, for ratios of whole sequences; None for one rank."""
    watch: Tensor | None = None
    """bool `[B]`: report what is blocked, and the rows of these sequences one by one. None reports nothing."""
    vocab_size: int = 0
    """Over which blocked tokens are counted by id."""
    advantage_at: AdvantageAt | None = None
    """Of rows, where they change within sequences, in place of `advantages`."""

    def __call__(self, index: int, microbatch: Microbatch, stats: TokenStats) -> tuple[Tensor, MicrobatchReport]:
        """This microbatch's share of the mini-batch loss; gradient through `stats.logp`, and where the configuration
        says so `stats.entropy` (a bonus) and `stats.topk_logp` (a KL to the reference)."""
        rows = microbatch.rows
        assert rows is not None, "the loss is computed on the last pipeline stage"
        sequence = rows.sequence.clamp(min=0)
        at = self.advantage_at
        advantages = self.advantages[sequence] if at is None else at(sequence, rows.position)
        recomputed = None if self.recomputed is None else self.recomputed[index]
        divergence = divergence_for(
            self.preset,
            logp=stats.logp,
            mu_logp=rows.mu_logp,
            recomputed_logp=None if recomputed is None else recomputed.logp,
            topk_logp=stats.topk_logp,
            mu_topk_logp=rows.topk_mu_logp,
            recomputed_topk_logp=None if recomputed is None else recomputed.topk_logp,
            topk_member=rows.topk_member,
        )
        penalty = None
        if self.reference is not None and self.reference_kl is not None:
            penalty = kl_of_rows(self.reference_kl.estimator, rows, stats, self.reference[index])
        by_sequence = self.preset.needs_sequences
        loss = policy_loss(
            self.preset,
            stats.logp,
            rows.mu_logp,
            advantages,
            loss_mask=rows.loss_mask,
            divergence=divergence,
            recomputed_logp=None if recomputed is None else recomputed.logp,
            entropy=stats.entropy,
            sequence_ids=sequence if by_sequence else None,
            num_sequences=len(self.advantages) if by_sequence else None,
            sequence_reduce=self._sum_over_context if by_sequence and self.context_group else None,
            returns=self.returns[sequence],
            penalty=penalty,
            penalty_coefficient=0.0 if self.reference_kl is None else self.reference_kl.coefficient,
        )
        weights = token_weights(
            rows.loss_mask, self.preset.aggregation, self.denominators, sequence_tokens=self.trained[sequence]
        )
        value = aggregate(loss.per_token, weights)
        bad = rows.loss_mask & ~torch.isfinite(loss.per_token.detach())
        blocked = None
        if self.watch is not None:
            seen = rows.loss_mask & self.watch[sequence]
            blocked = Blocked(
                masked_token_counts(rows.targets, advantages, rows.loss_mask, loss.mask, self.vocab_size),
                torch.stack([rows.sequence[seen], rows.position[seen], (~loss.mask[seen]).long()], dim=1),
            )
        return value, MicrobatchReport(value.detach(), loss.metrics, (bad, rows.sequence, rows.position), blocked)

    def _sum_over_context(self, totals: Tensor) -> Tensor:
        dist.all_reduce(totals, group=self.context_group)
        return totals


def kl_of_rows(
    estimator: KLEstimator, rows: RowTensors, policy: TokenStats | Recomputed, reference: Recomputed
) -> Tensor:
    """float64 `[S]`: the estimate of KL(policy || reference), with gradient to the policy's statistics alone."""
    if estimator is not KLEstimator.TOPK:
        return kl_of_sampled(estimator, policy.logp, reference.logp, rows.loss_mask)
    assert policy.topk_logp is not None
    assert reference.topk_logp is not None
    assert rows.topk_member is not None
    return kl_of_topk(policy.topk_logp, reference.topk_logp, rows.topk_member, rows.loss_mask)


def collect(index: int, microbatch: Microbatch, stats: TokenStats) -> tuple[Tensor, tuple[Microbatch, TokenStats]]:
    """The loss of a forward-only pass: nothing, but the statistics are kept."""
    return stats.logp.sum() * 0.0, (microbatch, stats)
