"""What a rollout step teaches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

_STRIDE = 1 << 32
"""More rows than a sequence has."""

AdvantageAt = Callable[[Tensor, Tensor], Tensor]
"""Advantages of rows, float32 `[S]`, from the number of the sequence and the row in it of each, int64 `[S]`."""


@dataclass(frozen=True)
class Spans:
    """Advantages of parts of sequences, `n` of them: a row has that of the last part of its sequence that began at or
    before it."""

    sequence: np.ndarray
    row: np.ndarray
    """int64 `[n]`, of the source, and of the sequence; sorted by both."""
    advantage: np.ndarray
    """float32 `[n]`"""

    def on(self, device: torch.device) -> AdvantageAt:
        """Where to ask for them on a device. Before the first part of a sequence, where nothing is trained, it is that
        of another."""
        begins = torch.from_numpy(self.sequence * _STRIDE + self.row).to(device)
        advantage = torch.from_numpy(self.advantage).to(device)

        def at(sequence: Int[Tensor, " S"], row: Int[Tensor, " S"]) -> Float[Tensor, " S"]:
            found = torch.searchsorted(begins, sequence * _STRIDE + row, right=True) - 1
            return advantage[found.clamp(min=0)]

        return at


@dataclass(frozen=True)
class TrainingSignal:
    """What a rollout step teaches, per sequence of the source; equal on all ranks."""

    advantages: np.ndarray
    """float32 `[B]`"""
    returns: np.ndarray
    """float32 `[B]`, rewards before the baseline."""
    mini_batches: Sequence[np.ndarray]
    """Sequence numbers of each gradient step, every sequence at most once."""
    epochs: int = 1
    """Passes over the mini-batches. The anchor does not move between them: mu is the rollout's, and what is recomputed
    (its statistics and, for R2, its routes) is so once, before the first pass."""
    episode: np.ndarray | None = None
    """int64 `[B]`: sequences of one number are one to the loss, which averages over episodes and takes the trained
    tokens of one alike; None where every sequence is an episode."""
    spans: Spans | None = None
    """Advantages that change within sequences, in place of `advantages`."""

    def episodes_of(self, sequences: np.ndarray) -> int:
        """How many episodes these sequences belong to."""
        return len(sequences if self.episode is None else np.unique(self.episode[sequences]))

    def trained_of_episode(self, trained: np.ndarray) -> np.ndarray:
        """int64 `[B]`: of each sequence the trained tokens of its whole episode; `trained` `[B]` are its own."""
        if self.episode is None:
            return trained
        return np.bincount(self.episode, weights=trained).astype(np.int64)[self.episode]
