"""Who knows where the rows of a rollout are, whatever became of the engine that sampled them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ray

from megatron_dppo.rollout.stored import Part


class RolloutStore:
    """A Ray actor that holds references to the columns of rollouts until they are released.

    The objects belong to the controller, which asked for them, not to the engine whose process wrote them: Ray keeps
    them when that process is killed. Any rank finds them here by the keys in a `RolloutHandle`.
    """

    def __init__(self) -> None:
        self._columns: dict[str, dict[str, ray.ObjectRef]] = {}

    def put(self, key: str, columns: Mapping[str, ray.ObjectRef]) -> None:
        """Hold an object's columns. Raises KeyError for a key that is held already: no sequence comes twice."""
        if key in self._columns:
            raise KeyError(f"rollout {key} is in the store already")
        self._columns[key] = dict(columns)

    def objects(self, parts: Sequence[Part]) -> list[ray.ObjectRef]:
        """References; the caller becomes a borrower, and no byte moves yet."""
        missing = {key for key, _ in parts} - self._columns.keys()
        if missing:
            raise KeyError(f"rollouts {sorted(missing)} were released or never made")
        return [self._columns[key][column] for key, column in parts]

    def release(self, keys: Sequence[str]) -> None:
        """Forget objects; Ray frees them as soon as nobody holds arrays of them."""
        for key in keys:
            self._columns.pop(key, None)

    def held(self) -> int:
        """Number of objects that were not released."""
        return len(self._columns)
