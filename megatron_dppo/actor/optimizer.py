"""Megatron-Core's distributed Adam, its learning-rate schedule, and a step that refuses non-finite gradients."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_dppo.actor.config import OptimizerConfig
from megatron_dppo.actor.multi_tensor import MultiTensorOptimizer, clip_gradients, end_step, gradient_norm
from megatron_dppo.errors import UserError


@dataclass(frozen=True)
class StepOutcome:
    """What one gradient step did."""

    applied: bool
    grad_norm: float
    """Global L2 norm before clipping; nan where the step was skipped."""
    lr: float
    """Learning rate of this step."""
    loss_scale: float = 1.0
    """Factor of the loss in this step's backward; 1 but for float16."""
    overflowed: bool = False
    """Skipped because the loss scale was too large, and lowered for the next step."""


class LossScale(DynamicGradScaler):
    """float16's loss scale: halved when `hysteresis` steps overflowed, doubled after `growth_interval` that did not.

    Megatron-Core gives dense and expert parameters optimizers with a scaler each, but scales the loss by the first
    one's alone. After an overflow in one kind only, the other's gradients would be divided by a wrong number. Here all
    share one object, which is updated once a step.
    """

    def update(self, found_inf: bool) -> None:
        """What each optimizer calls with what it found. Nothing is decided before all of them have looked."""

    def decide(self, overflowed: bool) -> bool:
        """Once a step, with what all found. Whether an overflow can be cured by a lower scale."""
        curable = bool((self.scale > self.min_scale).item())
        super().update(overflowed)
        return curable


def build_optimizer(
    config: OptimizerConfig, model_chunks: Sequence[torch.nn.Module], dtype: torch.dtype, **options: Any
) -> tuple[Any, OptimizerParamScheduler]:
    """The optimizer over all parameters of the wrapped chunks that want gradients, and its schedule. `options`: more
    fields of Megatron-Core's.

    Raises UserError where its state cannot live on the host as asked."""
    offload = config.cpu_offload_fraction > 0
    if offload:
        _check_offload(config, dtype, next(model_chunks[0].parameters()).device)
    settings = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=min(config.min_lr, config.lr),
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.epsilon,
        clip_grad=config.clip_grad,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        params_dtype=dtype,
        overlap_param_gather=config.overlap_param_gather,
        initial_loss_scale=config.initial_loss_scale,
        min_loss_scale=config.min_loss_scale,
        hysteresis=config.loss_scale_hysteresis,
        loss_scale_window=config.loss_scale_window,
        use_distributed_optimizer=True,
        optimizer_cpu_offload=offload,
        optimizer_offload_fraction=config.cpu_offload_fraction,
        use_precision_aware_optimizer=offload,  # otherwise float32 copies of the weights stay on the device as well
        overlap_cpu_optimizer_d2h_h2d=offload,
        **options,
    )
    # The standard overrides keep weight decay off norms and biases.
    overrides = get_standard_config_overrides(settings)
    optimizer = get_megatron_optimizer(settings, list(model_chunks), config_overrides=overrides)
    if offload:
        gc.collect()  # Megatron-Core made the optimizer twice, and the first one, float32 copies and all, is in cycles
    MultiTensorOptimizer.adopt(optimizer)
    if settings.fp16:
        _share_loss_scale(optimizer, settings)
    constant = config.schedule == "constant"
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=min(config.min_lr, config.lr),
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=config.warmup_steps + 1 if constant else config.decay_steps,
        lr_decay_style=config.schedule,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        # A resumed run takes its rates from its own configuration, and only the position from the checkpoint.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    return optimizer, scheduler


def _check_offload(config: OptimizerConfig, dtype: torch.dtype, device: torch.device) -> None:
    named = f"optimizer.cpu_offload_fraction={config.cpu_offload_fraction}"
    if device.type != "cuda":
        raise UserError(
            f"{named} needs a CUDA device: Megatron-Core's HybridDeviceOptimizer takes parameters in host memory for "
            "copies of its own; set it to 0"
        )
    config.check_offload(str(dtype).removeprefix("torch."))


def _share_loss_scale(optimizer: Any, settings: MegatronOptimizerConfig) -> None:
    scale = LossScale(
        initial_scale=settings.initial_loss_scale,
        min_scale=settings.min_loss_scale,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=int(settings.loss_scale_window),
        hysteresis=settings.hysteresis,
    )
    for part in optimizer.chained_optimizers:
        part.grad_scaler = scale


def guarded_step(optimizer: Any, scheduler: OptimizerParamScheduler, *, loss_is_finite: bool) -> StepOutcome:
    """Clip, step, advance the schedule by one; or leave all alone where the loss or the gradient's norm is not finite.

    Reduced gradients are expected (`finalize_model_grads` has run). One pass over them serves the check, the metric and
    clipping: a norm is finite only where every element is. Collectives: those of the norm, and for float16 of the
    overflow check; every rank takes the same decision.
    """
    try:
        return _step(optimizer, scheduler, loss_is_finite=loss_is_finite)
    finally:
        end_step(optimizer)


def _step(optimizer: Any, scheduler: OptimizerParamScheduler, *, loss_is_finite: bool) -> StepOutcome:
    lr = max(group["lr"] for group in optimizer.param_groups)
    scale = optimizer.get_loss_scale().item()
    skipped = StepOutcome(applied=False, grad_norm=float("nan"), lr=lr, loss_scale=scale)
    if not loss_is_finite:
        return skipped
    overflowed = bool(optimizer.prepare_grads())
    scaler = optimizer.chained_optimizers[0].grad_scaler
    curable = scaler is not None and scaler.decide(overflowed)
    if overflowed:
        return replace(skipped, overflowed=curable)
    norm = gradient_norm(optimizer)
    if not math.isfinite(norm):
        return skipped
    if optimizer.config.clip_grad > 0:
        clip_gradients(optimizer, norm=norm, limit=optimizer.config.clip_grad)
    optimizer.step_with_ready_grads()
    scheduler.step(increment=1)
    return StepOutcome(applied=True, grad_norm=norm, lr=lr, loss_scale=scale)
