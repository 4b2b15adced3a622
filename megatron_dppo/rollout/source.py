"""The sequences of a rollout in the object store, as the actor's ranks ask for them."""

from __future__ import annotations

import numpy as np

from megatron_dppo.batch import AlignedBatch, align
from megatron_dppo.rollout.ray_engine import RolloutHandle, fetch


class RolloutSource:
    """A `SequenceSource` over a `RolloutHandle`. Each rank pulls the objects that hold its rows, and nothing else."""

    def __init__(self, handle: RolloutHandle) -> None:
        self._handle = handle
        self.lengths = handle.lengths
        self.trained = handle.sampled
        """Every sampled token has a row that predicts it, since no prompt is empty."""
        self.routed = handle.routed

    def rows(self, sequences: np.ndarray) -> AlignedBatch:
        """The named sequences in the order named, aligned to the rows that predict their tokens."""
        return align(fetch(self._handle, sequences))
