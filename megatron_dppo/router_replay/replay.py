"""Replays recorded routes on the routers of a live Megatron-Core model."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.transformer.moe.router_replay import RouterReplay

from megatron_dppo.router_replay.accounting import ReplayCounts
from megatron_dppo.router_replay.layout import LocalRoutes
from megatron_dppo.router_replay.requirements import check_same_model


@dataclass(frozen=True)
class _Targets:
    """One microbatch's routes on the device, and how many rows they are."""

    microbatch: int
    experts: torch.Tensor
    """`[S, L, k]`"""
    forced: torch.Tensor
    """bool `[S]`"""
    counted: torch.Tensor
    """bool `[S]`: forced and real."""
    recorded: int
    gaps: int
    training: bool
    """Whether a backward follows."""


@dataclass(frozen=True)
class _Kept:
    """What a forward leaves for the recomputation of its layer."""

    microbatch: int
    experts: torch.Tensor
    """int64 `[S, k]`, forced and live ids merged."""
    rows: int
    """Without padding."""


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A tensor with the array's content. To a GPU through page-locked memory: a copy from ordinary memory waits for all
    work that is queued on the stream, and the host stops running ahead of the device."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class RouterReplayController:
    """Owns the hooks of one rank's model chunks.

    The stock `RouterReplay` forces every row, knows no gaps, and is found through a global list that keeps routers of
    discarded models. Here the live model's layers are walked, each MoE layer's router gets a hook for the length of
    one step, and the hook is taken off again. Forced and live ids are merged by `where`; gate values are gathered from
    the live scores at the merged ids, so the router keeps its gradient.

    A forward that activation checkpointing will repeat runs without gradients: exactly then the merged ids are kept, in
    forward order, and a router call outside of `microbatch` takes the oldest. Backward visits the microbatches of a
    chunk in forward order under 1F1B and interleaved schedules, so first in, first out is each microbatch's own. Where
    one microbatch's forward runs beside another's backward (`parallel.overlap_expert_exchange`) none is recomputed.
    """

    def __init__(self, routers: Sequence[tuple[int, Any]], *, force: bool = True, keep_routes: bool = False) -> None:
        """
        routers      (index into the local layers of `LocalRoutes`, router module)
        force        False only compares: the live routers decide
        keep_routes  remember what every row used, for `used_routes`
        """
        self._force, self._keep_routes = force, keep_routes
        self._hooks = [(router, _Hook(self, index)) for index, router in routers]
        self._targets: _Targets | None = None
        self._rows: Counter[tuple[str, int, int]] = Counter()
        self._differing: dict[int, dict[int, torch.Tensor]] = {}  # bool [S], by microbatch and layer
        self._brought: dict[int, LocalRoutes] = {}
        self._used: dict[tuple[int, int], torch.Tensor] = {}

    @contextmanager
    def installed(self) -> Iterator[RouterReplayController]:
        """Hooks are on the routers inside, and off afterwards whatever happened."""
        for router, hook in self._hooks:
            if getattr(router, "router_replay", None) is not None:
                raise RuntimeError("a router replay hook is already installed; close the other one first")
            router.router_replay = hook
        try:
            yield self
            for _, hook in self._hooks:
                if hook.kept:
                    raise RuntimeError(
                        f"{len(hook.kept)} routings of MoE layer {hook.index} of this rank were kept for activation "
                        f"recomputation and never used, first of microbatch {hook.kept[0].microbatch}: "
                        "a forward pass had no backward"
                    )
        finally:
            for router, hook in self._hooks:
                router.router_replay = None
                hook.kept.clear()

    def microbatch(
        self, index: int, routes: LocalRoutes, device: torch.device, *, training: bool
    ) -> AbstractContextManager[None]:
        """Around one forward call of one model chunk with microbatch `index`, or around each part of it that calls
        routers, where a schedule runs other microbatches' backward passes in between: it can be entered again.
        `training=False`: no backward follows.

        Raises UserError where the routes are another model's.
        """
        for router, hook in self._hooks:
            check_same_model(routes, hook.index, router)
        forced, real = routes.forced, routes.real
        self._brought[index] = routes
        return _Forward(
            self,
            _Targets(
                microbatch=index,
                experts=to_device(routes.experts, device),
                forced=to_device(forced, device),
                counted=to_device(forced & real, device),
                recorded=int((forced & real).sum()),
                gaps=int((~forced & real).sum()),
                training=training,
            ),
        )

    def counts(self, microbatches: int) -> ReplayCounts:
        """Rows by microbatch (`0..microbatches-1`) and layer of this rank (one device synchronisation)."""
        layers = len(self._hooks)
        shape = (microbatches, layers)
        sums = {
            name: np.array([[self._rows[name, m, layer] for layer in range(layers)] for m in range(microbatches)])
            .reshape(shape)
            .astype(np.int64)
            for name in ("replayed", "kept", "recomputed", "gaps")
        }
        sent = np.zeros(shape, dtype=np.int64)
        for m, routes in self._brought.items():
            sent[m] = int((routes.forced & routes.real).sum())
        differing, tokens = np.zeros(shape, dtype=np.int64), np.zeros(microbatches, dtype=np.int64)
        rows = [torch.stack(list(by_layer.values())) for by_layer in self._differing.values()]
        numbers = [torch.cat([of.sum(dim=1), of.any(dim=0).sum()[None]]) for of in rows]
        found = iter(torch.cat(numbers).tolist() if numbers else ())
        for m, by_layer in self._differing.items():
            differing[m, list(by_layer)] = [next(found) for _ in by_layer]
            tokens[m] = next(found)
        return ReplayCounts(sent=sent, differing=differing, differing_tokens=tokens, **sums)

    def used_routes(self, microbatch: int) -> LocalRoutes:
        """What the routers of this rank used for a microbatch, as a record that a later pass replays (R2): every real
        row is forced. Needs `keep_routes`."""
        brought = self._brought[microbatch]
        layers = [self._used[microbatch, layer] for layer in range(len(self._hooks))]
        experts = torch.stack(layers, dim=1).cpu().numpy().astype(brought.experts.dtype)
        return LocalRoutes(experts, np.ones_like(brought.forced), brought.real, brought.num_experts)

    def _route(self, hook: _Hook, scores: torch.Tensor, live_topk: Callable[[], torch.Tensor]) -> torch.Tensor:
        if self._targets is None:
            return self._recompute(hook, scores)
        targets, recorded = self._targets, self._targets.experts[:, hook.index].long()
        if len(recorded) != len(scores):
            raise RuntimeError(
                f"MoE layer {hook.index} of this rank routes {len(scores)} rows, the record holds {len(recorded)}: "
                "the pack and its routes were sliced differently"
            )
        key = (targets.microbatch, hook.index)
        live = live_topk()
        # Both name k different experts, so that they are the same set where each live one is among the recorded.
        elsewhere = (live.unsqueeze(2) != recorded.unsqueeze(1)).all(dim=2).any(dim=1)
        self._differing.setdefault(targets.microbatch, {})[hook.index] = elsewhere & targets.counted
        self._rows["replayed", *key] += targets.recorded
        self._rows["gaps", *key] += targets.gaps
        merged = torch.where(targets.forced[:, None], recorded, live) if self._force else live
        if self._keep_routes:
            self._used[key] = merged
        if targets.training and not torch.is_grad_enabled():
            rows = targets.recorded + targets.gaps
            self._rows["kept", *key] += rows
            hook.kept.append(_Kept(targets.microbatch, merged, rows))
        return merged

    def _recompute(self, hook: _Hook, scores: torch.Tensor) -> torch.Tensor:
        """A router call outside of `microbatch`: activation recomputation, in forward order."""
        if not hook.kept:
            raise RuntimeError(
                f"MoE layer {hook.index} of this rank ran outside of a microbatch with nothing kept to replay"
            )
        kept = hook.kept.popleft()
        if len(kept.experts) != len(scores):
            raise RuntimeError(
                f"MoE layer {hook.index} of this rank recomputes {len(scores)} rows, but microbatch {kept.microbatch}, "
                f"whose turn it is, has {len(kept.experts)}: the schedule runs backward passes in another order"
            )
        self._rows["recomputed", kept.microbatch, hook.index] += kept.rows
        return kept.experts


class _Forward(AbstractContextManager[None]):
    """Inside, router calls are of one microbatch's forward."""

    def __init__(self, controller: RouterReplayController, targets: _Targets) -> None:
        self._controller, self._own = controller, targets

    def __enter__(self) -> None:
        self._controller._targets = self._own

    def __exit__(self, *_: object) -> None:
        self._controller._targets = None


class _Hook(RouterReplay):
    """What a router calls in place of its top-k. Does not call the parent's constructor, which would add it to a
    global list that is never pruned."""

    def __init__(self, controller: RouterReplayController, index: int) -> None:
        self.controller = controller
        self.index = index
        self.kept: deque[_Kept] = deque()

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
