"""GEM's Sudoku for a policy that writes noise: whatever it says is taken for some move."""

from __future__ import annotations

from typing import Any, SupportsFloat

import gem


def move(action: str) -> str:
    """A legal form of move that depends on the text alone."""
    number = sum(action.encode())
    return f"\\boxed{{{number % 4 + 1} {number // 4 % 4 + 1} {number // 16 % 4 + 1}}}"


class LuckySudoku:
    """`game:Sudoku-v0-easy`, given `move(action)` instead of `action`."""

    def __init__(self) -> None:
        self._sudoku = gem.make("game:Sudoku-v0-easy")

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return self._sudoku.reset(seed=seed)

    def step(self, action: str) -> tuple[str, SupportsFloat, bool, bool, dict[str, Any]]:
        return self._sudoku.step(move(action))
