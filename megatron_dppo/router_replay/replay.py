"""Replays recorded routes on the routers of a live Megatron-Core model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.moe.router_replay import RouterReplay

from megatron_dppo.router_replay.layout import LocalRoutes


@dataclass(frozen=True)
class ReplayCounts:
    """What one rank's routers did since the hooks were put on, in (row, layer) pairs; padding is never counted.

    replayed  rows whose recorded experts were used (or, when only observing, compared)
    gaps      rows without a record, routed live
    differing rows whose live top-k set differs from the record
    differing_tokens  tokens (not pairs) that differ in any of this rank's layers
    """

    replayed: int
    gaps: int
    differing: int
    differing_tokens: int


@dataclass(frozen=True)
class _Targets:
    experts: torch.Tensor  # [S, L, k] int64
    forced: torch.Tensor  # [S] bool
    counted: torch.Tensor  # [S] bool: forced and real
    gaps: torch.Tensor  # [] number of real rows without a record


class RouterReplayController:
    """Owns the hooks of one rank's model chunks.

    The stock `RouterReplay` forces every row, knows no gaps, and is found through a global list that keeps routers of
    discarded models. Here the live model's layers are walked, each MoE layer's router gets a hook for the length of
    one step, and the hook is taken off again. Forced and live ids are merged by `where`; gate values are gathered from
    the live scores at the merged ids, so the router keeps its gradient.

    A forward that activation checkpointing will repeat runs without gradients: exactly then the merged ids are kept, in
    forward order, and a router call outside of `microbatch` takes the oldest. Backward visits the microbatches of a
    chunk in forward order under 1F1B and interleaved schedules, so first in, first out is each microbatch's own.
    """

    def __init__(self, routers: Sequence[tuple[int, Any]], *, force: bool = True) -> None:
        """`routers`: (index into the local layers of `LocalRoutes`, router module). `force=False` only compares."""
        self._force = force
        self._hooks = [(router, _Hook(self, index)) for index, router in routers]
        self._targets: _Targets | None = None
        self._training = False
        self._row_differs = torch.zeros(0, dtype=torch.bool)
        self._counts: dict[str, list[torch.Tensor]] = {
            name: [] for name in ("replayed", "gaps", "differing", "differing_tokens")
        }

    @contextmanager
    def installed(self) -> Iterator[RouterReplayController]:
        """Hooks are on the routers inside, and off afterwards whatever happened."""
        for router, hook in self._hooks:
            if getattr(router, "router_replay", None) is not None:
                raise RuntimeError("a router replay hook is already installed; close the other one first")
            router.router_replay = hook
        try:
            yield self
            left = sum(len(hook.kept) for _, hook in self._hooks)
            if left:
                raise RuntimeError(
                    f"{left} recorded routings were kept for activation recomputation and never used: "
                    "a forward pass had no backward"
                )
        finally:
            for router, hook in self._hooks:
                router.router_replay = None
                hook.kept.clear()

    @contextmanager
    def microbatch(self, routes: LocalRoutes, device: torch.device, *, training: bool) -> Iterator[None]:
        """Around one forward call of one model chunk. `training=False`: no backward will follow."""
        forced, real = torch.from_numpy(routes.forced), torch.from_numpy(routes.real)
        self._targets = _Targets(
            experts=torch.from_numpy(routes.experts).to(device),
            forced=forced.to(device),
            counted=(forced & real).to(device),
            gaps=(~forced & real).sum(),
        )
        self._training = training
        self._row_differs = torch.zeros(len(real), dtype=torch.bool, device=device)
        try:
            yield
            self._counts["differing_tokens"].append(self._row_differs.sum())
        finally:
            self._targets = None

    def counts(self) -> ReplayCounts:
        """Totals over all layers and microbatches of this rank (one device synchronisation)."""
        return ReplayCounts(**{name: int(sum(int(v) for v in values)) for name, values in self._counts.items()})

    def _route(self, hook: _Hook, scores: torch.Tensor, live_topk: Callable[[], torch.Tensor]) -> torch.Tensor:
        if self._targets is None:
            if not hook.kept:
                raise RuntimeError(
                    f"MoE layer {hook.index} of this rank ran outside of a microbatch with nothing kept to replay"
                )
            return hook.kept.popleft()
        targets, recorded = self._targets, self._targets.experts[:, hook.index]
        if len(recorded) != len(scores):
            raise RuntimeError(
                f"MoE layer {hook.index} of this rank routes {len(scores)} rows, the record holds {len(recorded)}: "
                "the pack and its routes were sliced differently"
            )
        live = live_topk()
        differs = (live.sort(dim=1).values != recorded.sort(dim=1).values).any(dim=1) & targets.counted
        self._row_differs |= differs
        self._counts["replayed"].append(targets.counted.sum())
        self._counts["gaps"].append(targets.gaps)
        self._counts["differing"].append(differs.sum())
        merged = torch.where(targets.forced[:, None], recorded, live) if self._force else live
        if self._training and not torch.is_grad_enabled():
            hook.kept.append(merged)
        return merged


class _Hook(RouterReplay):
    """What a router calls in place of its top-k. Does not call the parent's constructor, which would add it to a
    global list that is never pruned."""

    def __init__(self, controller: RouterReplayController, index: int) -> None:
        self.controller = controller
        self.index = index
        self.kept: deque[torch.Tensor] = deque()

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert default_compute_topk is not None

        def live_topk() -> torch.Tensor:
            with torch.no_grad():
                return default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)[1]

        indices = self.controller._route(self, scores, live_topk)
        return scores.gather(1, indices), indices


def moe_layer_numbers(config: Any) -> list[int]:
    """1-based numbers of the MoE layers of the whole model, in order, from a Megatron-Core `TransformerConfig`."""
    if config.num_moe_experts is None:
        return []
    frequency = config.moe_layer_freq
    pattern = [i % frequency == 0 for i in range(config.num_layers)] if isinstance(frequency, int) else frequency
    return [number for number, is_moe in enumerate(pattern, start=1) if is_moe]


def find_routers(model_chunks: Sequence[Any], moe_layer_numbers: Sequence[int]) -> list[tuple[int, Any]]:
    """(index into the model's MoE layers, router) of every MoE layer the chunks hold.

    moe_layer_numbers: 1-based numbers of all MoE layers of the whole model, in order; layers are identified by their
    own `layer_number`, never by position, so pipeline and virtual stages need no offset.
    """
    index_of = {number: index for index, number in enumerate(moe_layer_numbers)}
    found = []
    for chunk in model_chunks:
        for layer in chunk.decoder.layers:
            router = getattr(layer.mlp, "router", None)
            if router is not None:
                found.append((index_of[layer.layer_number], router))
    return found
