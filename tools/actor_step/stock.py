"""Megatron-Core's and TransformerEngine's own parts in place of this project's, to compare with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from megatron_dppo.actor import optimizer as actor_optimizer
from megatron_dppo.actor.actor import MegatronActor
from megatron_dppo.models.experts.module import OneLaunchExperts, UnwaitingDispatcher


@contextmanager
def stock_optimizer(optimizer: Any) -> Iterator[None]:
    """Inside, an actor's `optimizer` steps as Megatron-Core wrote it, parameter by parameter."""
    parts = optimizer.chained_optimizers
    ours = [type(part) for part in parts]
    functions = actor_optimizer.gradient_norm, actor_optimizer.clip_gradients
    for part in parts:
        part.__class__, part._defer_param_sync = DistributedOptimizer, False
    actor_optimizer.gradient_norm, actor_optimizer.clip_gradients = _norm, _clip
    try:
        yield
    finally:
        for part, kind in zip(parts, ours, strict=True):
            part.__class__, part._defer_param_sync = kind, part is not parts[-1]
        actor_optimizer.gradient_norm, actor_optimizer.clip_gradients = functions


@contextmanager
def stock_kernels(actor: MegatronActor) -> Iterator[None]:
    """Inside, experts, their dispatcher, norms and Adam are Megatron-Core's and TransformerEngine's; clipping and
    casts remain `MultiTensorOptimizer`'s, a launch for many parameters."""
    ours = [m for chunk in actor.model for m in chunk.modules() if isinstance(m, OneLaunchExperts)]
    holders = [m for chunk in actor.model for m in chunk.modules() if hasattr(m, "token_dispatcher")]
    dispatchers = [m.token_dispatcher for m in holders if isinstance(m.token_dispatcher, UnwaitingDispatcher)]
    norms = [m for chunk in actor.model for m in chunk.modules() if type(m).__name__ == "DirectRMSNorm"]
    ours_of_norms = [type(norm) for norm in norms]
    parts: Any = actor.optimizer.chained_optimizers
    for norm in norms:
        norm.__class__ = type(norm).__bases__[0]
    for experts in ours:
        experts.__class__ = TEGroupedMLP
    for dispatcher in dispatchers:
        dispatcher.__class__ = MoEAlltoAllTokenDispatcher
    for part in parts:
        part.adam = None  # a cached property
    try:
        yield
    finally:
        for norm, kind in zip(norms, ours_of_norms, strict=True):
            norm.__class__ = kind
        for experts in ours:
            experts.__class__ = OneLaunchExperts
        for dispatcher in dispatchers:
            dispatcher.__class__ = UnwaitingDispatcher
        for part in parts:
            del part.adam


def _norm(optimizer: Any) -> float:
    return float(optimizer.get_grad_norm())


@torch.no_grad()
def _clip(optimizer: Any, *, norm: float, limit: float) -> None:
    clip_grad_by_total_norm_fp32(optimizer.get_parameters(), max_norm=limit, total_norm=norm)
