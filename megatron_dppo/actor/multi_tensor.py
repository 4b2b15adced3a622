"""What the distributed optimizer does around Adam, for all parameters at once instead of one after the other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megatron_dppo.actor.fused_adam import FusedAdam


class MultiTensorOptimizer(DistributedOptimizer):
    """`DistributedOptimizer` with the same arithmetic and few launches.

    Every expert of every layer has two matrices: 1,024 parameters for 4 layers of 128 experts. For each of them the
    stock class cuts a gradient shard out of its buffer, takes a norm and waits for it, scales, and casts the master
    weight back: with TransformerEngine 2.12 also norm and scaling are loops, since Megatron-Core 0.19 wants a kernel of
    a later version and falls back. On an H100 that is some 5,000 launches and 1,000 waits a step, and the GPU idles
    for most of it. Here the shards are cut once (buffers never move; `Offloader` empties storages and keeps the views)
    and torch's multi-tensor kernels walk the lists.

    float32 or 16-bit weights; quantised ones and Megatron-FSDP need the stock class.
    """

    @classmethod
    def adopt(cls, optimizer: Any) -> None:
        """Make every part of a `ChainedOptimizer` one of this class; Megatron-Core names the stock one itself.

        Each part would gather the updated weights of all of them over the data-parallel ranks: only the last one, when
        all are updated, needs to.
        """
        for part in optimizer.chained_optimizers:
            if type(part) is not DistributedOptimizer:
                raise TypeError(f"expected Megatron-Core's DistributedOptimizer, got {type(part).__name__}")
            part.__class__ = cls
        for part in optimizer.chained_optimizers[:-1]:
            part._defer_param_sync = True

    def gradients(self) -> list[Tensor]:
        """This rank's shard of the gradient of each parameter, float32."""
        return [gradient for _, gradient, _ in self._shards]

    @cached_property
    def gradients_for_norm(self) -> list[Tensor]:
        """Those of `gradients` that no other rank of the gradient-statistics group counts."""
        self._copy_model_grads_to_main_grads()
        return self.get_grads_for_grad_norm()

    @cached_property
    def _shards(self) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """(what Adam updates, its gradient, the weight shard it is cast to); None where Adam updates the weights."""
        return [] if self.is_stub_optimizer else list(self._cut())

    def _cut(self) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        decoupled = self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        halves = self.shard_float16_groups if decoupled else self.shard_fp32_from_float16_groups
        for is_half, model_groups, shard_groups in (
            (True, self.model_float16_groups, halves),
            (False, self.model_fp32_groups, self.shard_fp32_groups),
        ):
            for model_group, shard_group in zip(model_groups, shard_groups, strict=True):
                for weight, shard in zip(model_group, shard_group, strict=True):
                    owned = self._get_model_param_range_map(weight)["param"]
                    gradient = weight.main_grad.view(-1)[owned.start : owned.end]
                    cast_to = weight.detach().view(-1)[owned.start : owned.end] if is_half and not decoupled else None
                    yield shard, gradient, cast_to

    @cached_property
    def adam(self) -> FusedAdam | None:
        """What steps this part in one launch; None where its optimizer is another than TransformerEngine's on a GPU."""
        if self.is_stub_optimizer or not FusedAdam.fits(self.optimizer):
            return None
        counted = {id(gradient) for gradient in self.gradients_for_norm}
        return FusedAdam(
            self.optimizer,
            weights={id(shard): weight for shard, _, weight in self._shards if weight is not None},
            counted=frozenset(id(shard) for shard, gradient, _ in self._shards if id(gradient) in counted),
        )

    clip_factor = 1.0
    """What the next step multiplies gradients by."""

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        if self.adam is None:
            return bool(super().step_with_ready_grads())
        self.adam.step(scale=self.clip_factor)
        self.clip_factor = 1.0
        if not self.ddp_config.overlap_param_gather and not getattr(self, "_defer_param_sync", False):
            self.start_param_sync_for_bucket_group_subset()
        return True

    def _copy_model_grads_to_main_grads(self) -> None:
        name = "decoupled_grad" if self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 else "grad"
        for shard, gradient, _ in self._shards:
            setattr(shard, name, gradient)

    def _copy_main_params_to_model_params(self) -> None:
        pairs = [(weight, master) for master, _, weight in self._shards if weight is not None]
        if pairs:
            weights, masters = zip(*pairs, strict=True)
            torch._foreach_copy_(weights, masters)


def prepare_step(optimizer: Any) -> None:
    """What the host has to do for the next step, to be done while the device computes gradients, which are reduced. The
    device goes on with their norm, unless they still have to be divided by a loss scale."""
    for part in _fused(optimizer):
        part._copy_model_grads_to_main_grads()
        part.adam.prepare(norm=part.grad_scaler is None)


def end_step(optimizer: Any) -> None:
    """Taken or skipped: what was prepared holds no longer."""
    for part in _fused(optimizer):
        part.adam.forget()


def _fused(optimizer: Any) -> list[Any]:
    parts = optimizer.chained_optimizers
    return [part for part in parts if isinstance(part, MultiTensorOptimizer) and part.adam is not None]


@torch.no_grad()
def gradient_norm(optimizer: Any) -> float:
    """L2 norm of the whole gradient. Collective over the gradient-statistics group; waits for the device once."""
    square = torch.zeros((), dtype=torch.float32, device=torch.cuda.current_device())
    gradients: list[Tensor] = []
    for part in optimizer.chained_optimizers:
        if part.adam is None:
            gradients += part.gradients_for_norm
        else:
            square += part.adam.square_norm()
    if gradients:
        square += torch.nn.utils.get_total_norm(gradients).square()
    dist.all_reduce(square, group=optimizer.get_grad_stats_parallel_group())
    return math.sqrt(square.item())


@torch.no_grad()
def clip_gradients(optimizer: Any, *, norm: float, limit: float) -> None:
    """Scale the gradient down to a norm of `limit` where it has more; `FusedAdam` does so in its step."""
    factor = limit / (norm + 1e-6)
    if factor >= 1:
        return
    gradients: list[Tensor] = []
    for part in optimizer.chained_optimizers:
        if part.adam is None:
            gradients += part.gradients()
        else:
            part.clip_factor = factor
    if gradients:
        torch._foreach_mul_(gradients, factor)
