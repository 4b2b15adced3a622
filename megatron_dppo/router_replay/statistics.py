"""How evenly routes load the experts, and how much two records of the same tokens agree."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_dppo.router_replay.routes import Routes


@dataclass(frozen=True)
class Load:
    """Of `L` MoE layers with `E` experts, over the rows that have a route.

    share      float64 `[L, E]`, fraction of a layer's assignments that each expert got; even is 1 / E
    busiest    float64 `[L]`, share of the busiest expert times E (1 = even): by how much it outlasts the average
    effective  float64 `[L]`, exp of the entropy of `share`: as many evenly used experts have that entropy
    unused     int64 `[L]`, experts that got nothing
    """

    share: np.ndarray
    busiest: np.ndarray
    effective: np.ndarray
    unused: np.ndarray


@dataclass(frozen=True)
class Overlap:
    """Of two records, over the `rows` that have a route in both, by layer.

    common     float64 `[L]`, mean fraction of a token's experts that both chose
    identical  float64 `[L]`, fraction of tokens whose sets of experts are equal
    """

    rows: int
    common: np.ndarray
    identical: np.ndarray


def load(routes: Routes) -> Load:
    """Raises ValueError where no row has a route."""
    experts = routes.experts[routes.valid]
    if len(experts) == 0:
        raise ValueError("no token of these routes has a route")
    counts = np.stack([np.bincount(layer.ravel(), minlength=routes.num_experts) for layer in experts.swapaxes(0, 1)])
    share = counts / counts.sum(axis=1, keepdims=True)
    entropy = -np.sum(share * np.log(np.where(share > 0, share, 1.0)), axis=1)
    return Load(share, share.max(axis=1) * routes.num_experts, np.exp(entropy), (counts == 0).sum(axis=1))


def overlap(one: Routes, other: Routes) -> Overlap:
    """Raises ValueError unless both are of the same tokens and model."""
    if one.experts.shape != other.experts.shape or one.num_experts != other.num_experts:
        raise ValueError(
            f"routes {one.experts.shape} of {one.num_experts} experts and {other.experts.shape} of "
            f"{other.num_experts} are not of the same tokens and model"
        )
    both = one.valid & other.valid
    a, b = one.experts[both], other.experts[both]
    shared = (a[..., :, None] == b[..., None, :]).any(axis=-1).sum(axis=-1)
    rows = max(len(a), 1)
    return Overlap(
        rows=int(both.sum()),
        common=shared.sum(axis=0) / (rows * one.topk),
        identical=(shared == one.topk).sum(axis=0) / rows,
    )
