"""Megatron-Core's distributed Adam, its learning-rate schedule, and a step that refuses non-finite gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_dppo.actor.config import OptimizerConfig


@dataclass(frozen=True)
class StepOutcome:
    """What one gradient step did."""

    applied: bool
    grad_norm: float
    """Global L2 norm before clipping; nan where the step was skipped."""
    lr: float
    """Learning rate of this step."""


def build_optimizer(
    config: OptimizerConfig, model_chunks: Sequence[torch.nn.Module], dtype: torch.dtype
) -> tuple[Any, OptimizerParamScheduler]:
    """The optimizer over all parameters of the wrapped chunks that want gradients, and its schedule."""
    settings = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=min(config.min_lr, config.lr),
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.epsilon,
        # An unreachable bound instead of 0: Megatron-Core does not report the norm with clipping switched off.
        clip_grad=config.clip_grad or float("inf"),
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )
    # The standard overrides keep weight decay off norms and biases.
    overrides = get_standard_config_overrides(settings)
    optimizer = get_megatron_optimizer(settings, list(model_chunks), config_overrides=overrides)
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


def gradients_are_finite(model_chunks: Sequence[Any]) -> bool:
    """Whether every rank's gradient buffers are finite. The answer is the same on all ranks (one all-reduce)."""
    buffers = [b for chunk in model_chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    finite = torch.stack([torch.isfinite(b.grad_data).all() for b in buffers]).all().to(torch.int32)
    torch.distributed.all_reduce(finite, op=torch.distributed.ReduceOp.MIN)
    return bool(finite)


def guarded_step(
    optimizer: Any, scheduler: OptimizerParamScheduler, model_chunks: Sequence[Any], *, loss_is_finite: bool
) -> StepOutcome:
    """Clip, step, advance the schedule by one; or leave all alone where the loss or a gradient is not finite.

    Reduced gradients are expected (`finalize_model_grads` has run). A float16 overflow found by the loss scaler counts
    as not finite too, and lowers the scale.
    """
    lr = max(group["lr"] for group in optimizer.param_groups)
    overflow_is_handled = optimizer.get_loss_scale().item() != 1.0
    if not (loss_is_finite and (overflow_is_handled or gradients_are_finite(model_chunks))):
        return StepOutcome(applied=False, grad_norm=float("nan"), lr=lr)
    applied, grad_norm, _ = optimizer.step()
    if not applied:
        return StepOutcome(applied=False, grad_norm=float("nan"), lr=lr)
    scheduler.step(increment=1)
    return StepOutcome(applied=True, grad_norm=float(grad_norm), lr=lr)
