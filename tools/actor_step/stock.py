"""Megatron-Core's own optimizer step, parameter by parameter, to compare `MultiTensorOptimizer` with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_dppo.actor import optimizer as actor_optimizer


@contextmanager
def stock_optimizer(optimizer: Any) -> Iterator[None]:
    """Inside, an actor's `optimizer` steps as Megatron-Core wrote it."""
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


def _norm(optimizer: Any) -> float:
    return float(optimizer.get_grad_norm())


@torch.no_grad()
def _clip(optimizer: Any, *, norm: float, limit: float) -> None:
    clip_grad_by_total_norm_fp32(optimizer.get_parameters(), max_norm=limit, total_norm=norm)
