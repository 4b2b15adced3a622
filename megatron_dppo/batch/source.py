"""Where a rank gets the sequences it trains on: everybody knows the sizes, each rank pulls only what it uses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from megatron_dppo.batch.aligned import AlignedBatch, Columns, align
from megatron_dppo.batch.rollout_batch import RolloutBatch


class SequenceSource(Protocol):
    """The sequences of one rollout step, addressed by their number `0..B-1`, the same on every rank."""

    lengths: np.ndarray
    """int64 `[B]`, rows of each sequence, prompt included."""
    trained: np.ndarray
    """int64 `[B]`, rows of each sequence whose target the policy sampled."""
    routed: np.ndarray
    """int64 `[B]`, rows of each sequence for which the engine recorded a route; 0 where it recorded none."""
    pulled_bytes: int
    """What came to this rank so far, in bytes; what comes twice without travelling twice counts once."""

    def rows(self, sequences: np.ndarray, columns: Columns | None = None) -> AlignedBatch:
        """The named sequences in the order named, with the columns wanted (all when None). Pulls nothing else."""
        ...


@dataclass
class InMemorySource:
    """Sequences that are in this process already."""

    batch: AlignedBatch
    lengths: np.ndarray
    trained: np.ndarray
    routed: np.ndarray
    pulled_bytes: int = field(default=0, init=False)

    @staticmethod
    def of(batch: RolloutBatch) -> InMemorySource:
        aligned = align(batch)
        return InMemorySource(aligned, aligned.lengths, aligned.trained_per_sequence, aligned.routed_per_sequence)

    def rows(self, sequences: np.ndarray, columns: Columns | None = None) -> AlignedBatch:
        rows = self.batch.select(sequences, columns)
        self.pulled_bytes += rows.nbytes
        return rows
