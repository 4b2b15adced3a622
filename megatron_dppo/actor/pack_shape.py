"""How many rows a pack has and which of them a rank works on."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from megatron_dppo.batch.context_parallel import sequence_multiple


@dataclass(frozen=True)
class Split:
    """How the rows of one pack are spread: over context-parallel ranks first, then over sequence-parallel ones."""

    context: int = 1
    """Ranks that share every sequence (CP)."""
    sequence: int = 1
    """Ranks that share a context-parallel rank's rows between tensor-parallel regions: TP with sequence parallelism,
    1 without."""

    @property
    def sequence_multiple(self) -> int:
        """Rows of every sequence are padded to a multiple of this."""
        return sequence_multiple(self.context)

    @property
    def pack_multiple(self) -> int:
        """Rows of a pack are padded to a multiple of this, so that each rank gets equally many."""
        return math.lcm(self.sequence_multiple, self.context * self.sequence)

    def padded(self, lengths: np.ndarray) -> np.ndarray:
        """Rows of each sequence with its own padding, int64."""
        return -(-np.asarray(lengths, dtype=np.int64) // self.sequence_multiple) * self.sequence_multiple

    def pack_rows(self, lengths: np.ndarray) -> int:
        """Rows of a pack of these sequences, padding included; at least one multiple, so no rank is without rows."""
        rows = int(self.padded(lengths).sum())
        return max(self.pack_multiple, -(-rows // self.pack_multiple) * self.pack_multiple)


@dataclass(frozen=True)
class PackShape:
    """One pack of sequences, laid out."""

    source: np.ndarray
    """int64 `[P]`: row of the (concatenated) sequences that each row of the pack holds, -1 for padding."""
    position: np.ndarray
    """int64 `[P]`: place within its packed sequence; padding goes on counting."""
    sequence: np.ndarray
    """int64 `[P]`: number of the sequence within the pack, -1 for padding."""
    lengths: np.ndarray
    """int64: rows of each packed sequence; padding at the end of the pack is one more sequence."""

    @staticmethod
    def of(lengths: np.ndarray, split: Split, *, rows: int | None = None) -> PackShape:
        """Lay out sequences of `lengths` rows; `rows` asks for a longer pack than they need (filled with padding).

        Padding stands behind each sequence's rows. Attention is causal, so no real row sees it.
        """
        lengths = np.asarray(lengths, dtype=np.int64)
        packed = split.padded(lengths)
        total = split.pack_rows(lengths) if rows is None else rows
        tail = total - int(packed.sum())
        if tail < 0 or total % split.pack_multiple:
            raise ValueError(
                f"sequences of {packed.sum()} rows do not make a pack of {total} rows (a multiple of "
                f"{split.pack_multiple})"
            )
        if tail:
            lengths, packed = np.append(lengths, 0), np.append(packed, tail)
        position = np.concatenate([np.arange(n) for n in packed])
        number = np.repeat(np.arange(len(packed)), packed)
        real = position < lengths[number]
        first = np.append(0, np.cumsum(lengths))
        return PackShape(
            source=np.where(real, first[number] + position, -1),
            position=position,
            sequence=np.where(real, number, -1),
            lengths=packed,
        )
