"""How far an update is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Unfinished:
    """An update that has begun and not returned: what of it is in the weights."""

    of: int
    """Its gradient steps."""
    done: int = 0
    """Those that ended, applied or skipped."""
    applied: int = 0
    """Those that changed the weights."""

    def __str__(self) -> str:
        skipped = self.done - self.applied
        return f"{self.done} of its {self.of} gradient steps" + (f", {skipped} of them skipped" if skipped else "")

    def step(self, *, applied: bool) -> None:
        """One more has ended."""
        self.done += 1
        self.applied += applied
