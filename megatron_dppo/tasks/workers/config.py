"""What rewards and environments say of the processes they run in."""

from __future__ import annotations

from typing import Literal

Sandbox = Literal["full", "none"]


def ordered_bounds(bounds: tuple[float, float]) -> tuple[float, float]:
    """Two numbers that float32 can say, the smaller first."""
    if not -3e38 < bounds[0] < bounds[1] < 3e38:
        raise ValueError("needs two finite numbers, the smaller first")
    return bounds
