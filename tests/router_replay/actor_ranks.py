"""An actor on this rank with a tiny model, and faults planted between the engine's record and its routers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_dppo.batch import RolloutBatch

SHAPE = {"groups": 3, "samples": 2, "topk": 5, "moe_layers": 4, "experts": 8, "k": 2}
NORMALISER, TEMPERATURE = 12.0, 0.25
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
    import torch

    from megatron_dppo.actor.actor import MegatronActor
    from megatron_dppo.actor.config import ActorConfig, OptimizerConfig
    from megatron_dppo.actor.runtime import start
    from megatron_dppo.algorithm import presets
    from megatron_dppo.checkpoint.hf_import import load_hf_weights
    from megatron_dppo.models.build import build_model
    from megatron_dppo.models.hf_config import load_hf_config
    from megatron_dppo.models.megatron_config import transformer_config
    from megatron_dppo.models.parallel import ParallelConfig

    parallel = ParallelConfig(**layout)
    runtime = start(parallel, seed=0, timeout_minutes=5)
    model = load_hf_config(path)
    config = transformer_config(model, parallel, params_dtype=torch.float32, recompute=recompute)
    chunks = build_model(model, config, runtime.groups)
    load_hf_weights(chunks, model, runtime.groups, path)
    return MegatronActor(
        runtime,
        chunks,
        parallel=parallel,
        config=ActorConfig(dtype="float32", max_tokens_per_microbatch=budget, router_replay=mode),
        optimizer=OptimizerConfig(lr=lr, clip_grad=1.0, epsilon=1e-3),
        preset=presets.get(preset),
        hf_config=model,
        temperature=temperature,
        normaliser=NORMALISER,
    )


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
def router_without_hook(actor: Any) -> Iterator[None]:
    """A kernel of MoE layer 2 that never asks the hook."""
    router = actor._routers[2][1]
    routing = router.routing

    def bypassing(*args: Any, **kwargs: Any) -> Any:
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


@contextmanager
def recomputation_without_hook(actor: Any) -> Iterator[None]:
    """MoE layer 1 recomputes with the live router, and what was kept for it stays behind."""
    import torch

    router = actor._routers[1][1]
    routing = router.routing

    def bypassing(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
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
