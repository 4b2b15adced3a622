"""Where a rank gets the sequences it trains on: everybody knows the sizes, each rank pulls only its own rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megatron_dppo.batch.aligned import AlignedBatch, align
from megatron_dppo.batch.rollout_batch import RolloutBatch


class SequenceSource(Protocol):
    """The sequences of one rollout step, addressed by their number `0..B-1`, the same on every rank."""

    lengths: np.ndarray
    """int64 `[B]`, rows of each sequence, prompt included."""
    trained: np.ndarray
    """int64 `[B]`, rows of each sequence whose target the policy sampled."""
    routed: np.ndarray
    """int64 `[B]`, rows of each sequence for which the engine recorded a route; 0 where it recorded none."""

    def rows(self, sequences: np.ndarray) -> AlignedBatch:
        """The named sequences in the order named. Pulls nothing else to this rank."""
        ...


@dataclass(frozen=True)
class InMemorySource:
    """Sequences that are in this process already."""

    batch: AlignedBatch
    lengths: np.ndarray
    trained: np.ndarray
    routed: np.ndarray

    @staticmethod
    def of(batch: RolloutBatch) -> InMemorySource:
        aligned = align(batch)
        return InMemorySource(aligned, aligned.lengths, aligned.trained_per_sequence, aligned.routed_per_sequence)

    def rows(self, sequences: np.ndarray) -> AlignedBatch:
        return self.batch.select(sequences)
