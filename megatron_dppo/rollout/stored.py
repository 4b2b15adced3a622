"""Rollouts in an object store: written once by the engine's process, pulled by column by the training ranks.

A rollout is cut into objects of a few sequences each, and each of those into the columns that different ranks want:
token ids (everybody), what the objective needs (the last pipeline stage), top-K (the last stage, if the preset
uses them) and routes by group of MoE layers (the stage that holds the layers).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megatron_dppo.batch import Columns, align
from megatron_dppo.batch.rollout_batch import RolloutBatch
from megatron_dppo.router_replay.routes import Routes

type Part = tuple[str, str]
"""Key of an object and name of a column of it ("tokens", "policy", "topk", "routes.0", "routes.1", ...)."""

type LayerGroups = Sequence[Sequence[int]]
"""Numbers of MoE layers whose routes are stored, and pulled, together."""


_BY_SEQUENCE = ("lengths", "prompt_lengths", "versions", "version_sums", "trained", "routed")
_BY_OBJECT = ("route_bytes", "topk_bytes")


@dataclass(frozen=True, kw_only=True)
class RolloutHandle:
    """A rollout in the object store: everything about it but its tokens. Plain data, to be broadcast to the ranks.

    `bounds[c]:bounds[c + 1]` are the sequences of object `c`; `layer_groups[g]` the MoE layers of column `routes.g`.
    """

    store: str
    """Name of the `RolloutStore` that knows the objects."""
    keys: tuple[str, ...] = field(repr=False)
    """Of each object there."""
    bounds: np.ndarray
    layer_groups: tuple[tuple[int, ...], ...]
    """Empty where no routes were recorded."""
    lengths: np.ndarray
    """int64 `[B]`, tokens of each sequence, prompt included."""
    prompt_lengths: np.ndarray
    """int32 `[B]`"""
    request_ids: tuple[str, ...] = field(repr=False)
    finish_reasons: tuple[str, ...] = field(repr=False)
    versions: np.ndarray
    """int32 `[B, 2]`, the oldest and the newest weights that sampled tokens of each sequence."""
    version_sums: np.ndarray
    """int64 `[B]`, the weight versions of the sampled tokens of each sequence, added up."""
    trained: np.ndarray
    """int64 `[B]`, tokens of each sequence that the policy sampled."""
    routed: np.ndarray
    """int64 `[B]`, tokens of each sequence whose experts were recorded."""
    route_bytes: np.ndarray
    """int64 `[objects]`, size of the routes in each; 0 when none were recorded."""
    topk_bytes: np.ndarray
    """int64 `[objects]`, size of the top-K in each."""

    @property
    def cut(self) -> np.ndarray:
        """See `RolloutBatch.cut`."""
        return np.array(self.finish_reasons) == "length"

    @staticmethod
    def concatenate(handles: Sequence[RolloutHandle]) -> RolloutHandle:
        """All objects of all handles, in order. Raises ValueError where they are not of one store and one model."""
        first = handles[0]
        if {(h.store, h.layer_groups) for h in handles} != {(first.store, first.layer_groups)}:
            raise ValueError("rollouts of different stores or models cannot be one")
        arrays = (*_BY_SEQUENCE, *_BY_OBJECT)
        sizes = np.concatenate([np.diff(h.bounds) for h in handles])
        return RolloutHandle(
            store=first.store,
            keys=tuple(key for h in handles for key in h.keys),
            bounds=np.concatenate([[0], np.cumsum(sizes)]),
            layer_groups=first.layer_groups,
            request_ids=tuple(r for h in handles for r in h.request_ids),
            finish_reasons=tuple(r for h in handles for r in h.finish_reasons),
            **{name: np.concatenate([getattr(h, name) for h in handles]) for name in arrays},
        )

    def select(self, objects: Sequence[int]) -> RolloutHandle:
        """The objects of these numbers, in this order."""
        chosen = list(objects)
        spans = [np.arange(self.bounds[number], self.bounds[number + 1]) for number in chosen]
        rows = np.concatenate(spans) if spans else np.empty(0, dtype=np.int64)
        return replace(
            self,
            keys=tuple(self.keys[number] for number in chosen),
            bounds=np.concatenate([[0], np.cumsum([len(span) for span in spans])]).astype(np.int64),
            request_ids=tuple(self.request_ids[row] for row in rows),
            finish_reasons=tuple(self.finish_reasons[row] for row in rows),
            **{name: getattr(self, name)[rows] for name in _BY_SEQUENCE},
            **{name: getattr(self, name)[chosen] for name in _BY_OBJECT},
        )

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.request_ids)

    def objects_of(self, sequences: np.ndarray) -> np.ndarray:
        """Number of the object that holds each of the named sequences."""
        return np.searchsorted(self.bounds, sequences, side="right") - 1

    def columns(self, wanted: Columns) -> list[str]:
        """Names of the stored columns that hold what is wanted."""
        names = ["tokens"]
        names += ["policy"] if wanted.policy else []
        names += ["topk"] if wanted.topk else []
        return names + [f"routes.{g}" for g in self.route_groups(wanted)]

    def route_groups(self, wanted: Columns) -> list[int]:
        """Numbers of the layer groups that hold the MoE layers wanted, in order. Raises KeyError for a layer that no
        group holds."""
        if wanted.moe_layers is None or not self.layer_groups:
            return list(range(len(self.layer_groups)))
        group_of = {layer: g for g, layers in enumerate(self.layer_groups) for layer in layers}
        return sorted({group_of[layer] for layer in wanted.moe_layers})


def column_names(layer_groups: LayerGroups | None) -> list[str]:
    """Names of the columns that `columns_of` makes, in its order."""
    groups = 1 if layer_groups is None else sum(1 for group in layer_groups if len(group))
    return ["tokens", "policy", "topk", *(f"routes.{g}" for g in range(groups))]


def columns_of(
    batch: RolloutBatch, *, store: str, key: str, layer_groups: LayerGroups | None
) -> tuple[RolloutHandle, list[Any]]:
    """The batch as one object of a store: its handle, and its columns by `column_names` (None for what there is not).

    Aligns the batch, here and nowhere else. `layer_groups` None: all MoE layers in one group. Raises ValueError where
    the groups do not cover the recorded MoE layers exactly.
    """
    aligned = align(batch)
    routes, topk = aligned.routes, aligned.topk
    groups = _checked_groups(routes, layer_groups)
    columns: list[Any] = [aligned.input_ids, aligned.policy, topk]
    if routes is not None:
        everything = np.arange(len(routes))
        columns += [routes.take(everything, layers) for layers in groups]
    columns += [None] * (len(column_names(layer_groups)) - len(columns))
    assert topk is not None
    handle = RolloutHandle(
        store=store,
        keys=(key,),
        bounds=np.array([0, len(batch)]),
        layer_groups=groups,
        lengths=batch.lengths,
        prompt_lengths=batch.prompt_lengths,
        request_ids=batch.request_ids,
        finish_reasons=batch.finish_reasons,
        **_versions_of(batch),
        trained=aligned.trained_per_sequence,
        routed=aligned.routed_per_sequence,
        route_bytes=np.array([0 if routes is None else routes.nbytes]),
        topk_bytes=np.array([topk.nbytes]),
    )
    return handle, columns


def _versions_of(batch: RolloutBatch) -> dict[str, np.ndarray]:
    starts, versions = batch.offsets[:-1], batch.weight_versions.astype(np.int64)
    oldest = np.minimum.reduceat(np.where(batch.loss_mask, versions, np.iinfo(np.int64).max), starts)
    newest = np.maximum.reduceat(np.where(batch.loss_mask, versions, -1), starts)
    return {
        "versions": np.stack([oldest, newest], axis=1).astype(np.int32),
        "version_sums": np.add.reduceat(np.where(batch.loss_mask, versions, 0), starts),
    }


def _checked_groups(routes: Routes | None, layer_groups: LayerGroups | None) -> tuple[tuple[int, ...], ...]:
    if routes is None:
        return ()
    everything = tuple(range(routes.moe_layers))
    groups = (everything,) if layer_groups is None else tuple(tuple(g) for g in layer_groups if len(g))
    if sorted(layer for g in groups for layer in g) != list(everything):
        raise ValueError(
            f"the engine recorded routes of {routes.moe_layers} MoE layers, but the training layout asks for the "
            f"groups {groups}: trainer and engine run different models"
        )
    return groups
