"""Which rows of the LM head a rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class VocabShard:
    """Columns ``[start, stop)`` of the (padded) vocabulary held by this rank.

    ``vocab_size`` is the true size: columns ``>= vocab_size`` are padding that Megatron adds to make the vocabulary
    divisible, and they never carry probability. Shards may be uneven, and a shard may be padding only; together the
    shards of ``group``'s ranks, in rank order, must cover ``[0, vocab_size)`` once.
    """

    start: int
    """First global column of this rank's weight."""
    stop: int
    """One past the last global column, padding included: the weight has ``stop - start`` rows."""
    vocab_size: int
    """True vocabulary size."""
    group: ProcessGroup | None = None
    """Tensor-parallel group the vocabulary is split over; None where it is not split."""

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"VocabShard needs 0 <= start <= stop, got start={self.start}, stop={self.stop}")
        if self.vocab_size < 1:
            raise ValueError(f"VocabShard.vocab_size must be positive, got {self.vocab_size}")
        if self.world_size == 1 and not (self.start == 0 and self.stop >= self.vocab_size):
            raise ValueError(
                f"VocabShard of a single rank must hold the whole vocabulary, got columns [{self.start}, {self.stop}) "
                f"of {self.vocab_size}; pass the tensor-parallel group"
            )

    @classmethod
    def even(cls, local_rows: int, vocab_size: int, group: ProcessGroup | None = None) -> Self:
        """Megatron's split: every rank of ``group`` holds ``local_rows`` rows, padding at the end."""
        world = group.size() if group is not None else 1
        rank = group.rank() if group is not None else 0
        if local_rows * world < vocab_size:
            raise ValueError(
                f"{world} rank(s) with {local_rows} LM-head rows each cannot hold a vocabulary of {vocab_size}; "
                "check vocab_size and the tensor-parallel group"
            )
        return cls(rank * local_rows, (rank + 1) * local_rows, vocab_size, group)

    @property
    def world_size(self) -> int:
        """Ranks the vocabulary is split over."""
        return self.group.size() if self.group is not None else 1

    @property
    def valid(self) -> int:
        """Local columns that are no padding: the first ``valid`` rows of the weight."""
        return max(0, min(self.stop, self.vocab_size) - self.start)
