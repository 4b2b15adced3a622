"""Rollouts in Ray's object store: who knows where their rows are, whatever became of the engine that sampled them, and
how a rank pulls the rows that it trains on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from megatron_dppo.batch import AlignedBatch, Columns
from megatron_dppo.batch.rollout_batch import rows_of
from megatron_dppo.rollout.stored import LayerGroups, Part, RolloutHandle, columns_of
from megatron_dppo.router_replay.routes import Routes

if TYPE_CHECKING:  # with torch, which the store's own process has no use for
    from megatron_dppo.rollout.engine import GenerationRequest, RolloutEngine, SamplingConfig


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


def sampled_columns(
    engine: RolloutEngine,
    requests: Sequence[GenerationRequest],
    sampling: SamplingConfig,
    *,
    store: str,
    key: str,
    layer_groups: LayerGroups | None,
) -> tuple[Any, ...]:
    """Where the engine lives: sample for training; the handle and the columns of `columns_of`."""
    batch = engine.generate(requests, sampling, training=True, call=key)
    handle, columns = columns_of(batch, store=store, key=key, layer_groups=layer_groups)
    return handle, *columns


class RolloutSource:
    """A `SequenceSource` over a `RolloutHandle`, on any rank with a `RaySession`. Pulls the objects that hold the rows
    and columns asked for, and nothing else; whole objects come to a node once."""

    def __init__(self, handle: RolloutHandle) -> None:
        self._handle = handle
        self.lengths = handle.lengths
        self.trained = handle.trained
        self.routed = handle.routed
        self.pulled_bytes = 0
        self._pulled: set[Part] = set()

    def rows(self, sequences: np.ndarray, columns: Columns | None = None) -> AlignedBatch:
        """The named sequences in the order named, with the columns wanted (all when None)."""
        handle, columns = self._handle, columns or Columns()
        wanted = np.asarray(sequences, dtype=np.int64)
        if len(wanted) and (wanted.min() < 0 or wanted.max() >= len(handle)):
            raise IndexError(f"sequences {wanted.min()}..{wanted.max()} of a rollout of {len(handle)}")
        # A pack without sequences still has the arrays' types and widths, which some object must tell.
        objects = handle.objects_of(wanted)
        numbers = np.unique(objects) if len(wanted) else np.zeros(1, dtype=np.int64)
        names = handle.columns(columns)
        arrays = self._pull([(handle.keys[n], name) for name in names for n in numbers])
        # A pack takes few sequences of an object that has many: what is not of it is never copied.
        chunks = [self._chunk(int(n), wanted[objects == n], arrays, columns) for n in numbers]
        joined = chunks[0] if len(chunks) == 1 else AlignedBatch.concatenate(chunks)
        by_object = np.argsort(objects, kind="stable")
        return joined if (np.diff(by_object) == 1).all() else joined.select(np.argsort(by_object))

    def token_ids(self) -> list[np.ndarray]:
        """Token ids of every sequence, for a reader that decodes them."""
        arrays = self._pull([(key, "tokens") for key in self._handle.keys])
        joined = np.concatenate([arrays[key, "tokens"] for key in self._handle.keys])
        return np.split(joined, np.cumsum(self.lengths)[:-1])

    def _pull(self, parts: list[Part]) -> dict[Part, Any]:
        store: Any = ray.get_actor(self._handle.store)
        values = ray.get(ray.get(store.objects.remote(parts)))
        for part, value in zip(parts, values, strict=True):
            if part not in self._pulled:
                self._pulled.add(part)
                self.pulled_bytes += value.nbytes
        return dict(zip(parts, values, strict=True))

    def _chunk(self, number: int, sequences: np.ndarray, arrays: dict[Part, Any], columns: Columns) -> AlignedBatch:
        """The named sequences, all of which the object holds."""
        handle, key, first = self._handle, self._handle.keys[number], self._handle.bounds[number]
        lengths = handle.lengths[first : handle.bounds[number + 1]]
        held = AlignedBatch(
            input_ids=arrays[key, "tokens"],
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            policy=arrays.get((key, "policy")),
            topk=arrays.get((key, "topk")),
            routes=None,
        )
        routes = self._routes(key, arrays, columns, rows_of(held.offsets, sequences - first))
        return replace(held.select(sequences - first), routes=routes)

    def _routes(self, key: str, arrays: dict[Part, Any], columns: Columns, rows: np.ndarray) -> Routes | None:
        groups = self._handle.route_groups(columns)
        if not groups:
            return None
        parts: list[Routes] = [arrays[key, f"routes.{g}"].take(rows) for g in groups]
        held = [layer for g in groups for layer in self._handle.layer_groups[g]]
        order = list(range(max(held) + 1)) if columns.moe_layers is None else list(columns.moe_layers)
        if len(parts) == 1 and held == order:
            return parts[0]
        stacked = np.concatenate([part.experts for part in parts], axis=1)
        return replace(parts[0], experts=stacked[:, [held.index(layer) for layer in order]])
