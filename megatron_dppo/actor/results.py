"""What the actor's methods return, and how far an update is: values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class UpdateReport:
    """What an update did."""

    metrics: dict[str, float]
    """The same on all ranks."""
    masked_counts: Tensor | None = None
    """int64 `[2, V]`, the tokens that the trust region blocked (`masked_token_counts`), where it was asked for; equal
    on all ranks."""
    watched: np.ndarray = field(default_factory=lambda: np.zeros((0, 3), dtype=np.int64))
    """int64 `[n, 3]`, of every trained row of the sequences that were watched: sequence, row in it (what it predicts is
    the next token), and 1 where the trust region blocked it in any epoch; equal on all ranks."""


@dataclass(frozen=True)
class ParityReport:
    """How far the actor's log-probabilities are from the engine's."""

    metrics: dict[str, float]
    """The same on all ranks."""
    tokens: np.ndarray
    """Log mu, log pi, id, number of the sequence and row in it, of the tokens that were kept, float32 `[n, 5]`; equal
    on all ranks."""


@dataclass(frozen=True)
class UpdateProgress:
    """An update that has begun and not returned: what of it is in the weights."""

    of: int
    """Its gradient steps."""
    done: int = 0
    """Those that ended, applied or skipped."""
    applied: int = 0
    """Those that changed the weights."""
    inside: bool = False
    """In a pass or an optimizer step. Where an error came out of one, ranks may have stopped at different places, and
    the weights are no gradient step's."""

    def __str__(self) -> str:
        skipped = self.done - self.applied
        return f"{self.done} of its {self.of} gradient steps" + (f", {skipped} of them skipped" if skipped else "")


class ProgressTeller:
    """Tells a listener each change of an update's progress."""

    def __init__(self, of: int, listener: Callable[[UpdateProgress], None] | None) -> None:
        self._listener = listener
        self._tell(UpdateProgress(of))

    @contextmanager
    def inside(self) -> Iterator[None]:
        """For a pass or an optimizer step. An error leaves the progress inside."""
        self._tell(replace(self._now, inside=True))
        yield
        self._tell(replace(self._now, inside=False))

    def step(self, *, applied: bool) -> None:
        """One more gradient step has ended."""
        self._tell(replace(self._now, done=self._now.done + 1, applied=self._now.applied + applied))

    def _tell(self, now: UpdateProgress) -> None:
        self._now = now
        if self._listener is not None:
            self._listener(now)
