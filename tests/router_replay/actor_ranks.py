"""An actor on this rank with a tiny model, and faults planted between the engine's record and its routers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_dppo.batch import RolloutBatch
from tests.actor import matrix
from tests.actor.matrix import TEMPERATURE

SHAPE = {"groups": 3, "samples": 2, "topk": 5, "moe_layers": 4, "experts": 8, "k": 2}
ADVANTAGES = np.array([1.0, -1.0, 0.7, -0.7, 0.5, -0.5])


def build_actor(
    path: str,
    layout: dict,
    *,
    preset: str,
    mode: str,
    recompute: str = "none",
    lr: float = 2e-3,
    budget: int = 48,
    temperature: float = TEMPERATURE,
) -> Any:
    case = matrix.Case(preset, recompute=recompute, budget=budget)
    return matrix.build_actor(path, layout, case, mode=mode, temperature=temperature, lr=lr)


def signal(mini_batches: list[np.ndarray]) -> Any:
    from megatron_dppo.actor.actor import TrainingSignal

    return TrainingSignal(ADVANTAGES, ADVANTAGES, mini_batches)


class Handed:
    """A source whose rows are not what its metadata promised."""

    def __init__(self, batch: RolloutBatch, change: Any) -> None:
        from megatron_dppo.batch import InMemorySource

        self._source, self._change = InMemorySource.of(batch), change
        self.lengths, self.trained, self.routed = self._source.lengths, self._source.trained, self._source.routed

    def rows(self, *args: Any) -> Any:
        return self._change(self._source.rows(*args))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


def without_routes(aligned: Any) -> Any:
    return replace(aligned, routes=None)


def invalidated(aligned: Any) -> Any:
    routes = aligned.routes
    return replace(aligned, routes=replace(routes, valid=np.zeros_like(routes.valid)))


def one_row_lost(aligned: Any) -> Any:
    valid = aligned.routes.valid.copy()
    if valid.any():
        valid[np.flatnonzero(valid)[-1]] = False
    return replace(aligned, routes=replace(aligned.routes, valid=valid))


def other_model(aligned: Any) -> Any:
    return replace(aligned, routes=replace(aligned.routes, num_experts=16))


@contextmanager
def _unhooked(router: Any, when: Callable[[], bool]) -> Iterator[None]:
    """The router does not ask its hook where `when` says so."""
    routing = router.routing

    def bypassing(*args: Any, **kwargs: Any) -> Any:
        if not when():
            return routing(*args, **kwargs)
        hook, router.router_replay = router.router_replay, None
        try:
            return routing(*args, **kwargs)
        finally:
            router.router_replay = hook

    router.routing = bypassing
    try:
        yield
    finally:
        del router.routing


def router_without_hook(actor: Any) -> AbstractContextManager[None]:
    """A kernel of MoE layer 2 that never asks the hook."""
    return _unhooked(actor._passes.routers[2][1], lambda: True)


def recomputation_without_hook(actor: Any) -> AbstractContextManager[None]:
    """MoE layer 1 recomputes with the live router, and what was kept for it stays behind."""
    import torch

    return _unhooked(actor._passes.routers[1][1], torch.is_grad_enabled)
