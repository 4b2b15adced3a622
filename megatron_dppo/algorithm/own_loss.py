"""A per-token loss of the user's own (`algorithm.loss: package.module:function`), and the trial of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from megatron_dppo.algorithm.divergence import DivergenceInputs
from megatron_dppo.algorithm.preset import Preset, PresetError
from megatron_dppo.launch.imports import load_callable


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """What a loss is given of the T rows of a microbatch. Rows outside `loss_mask` hold 0 in every float."""

    logp: Float[Tensor, " T"]
    """log pi(y_t | s_t) of the sampled token, with gradient."""
    entropy: Float[Tensor, " T"] | None
    """Of the trained policy's next-token distribution, in nats, with gradient."""
    mu_logp: Float64[Tensor, " T"]
    """log mu(y_t | s_t) of the engine that drew the token."""
    recomputed_logp: Float64[Tensor, " T"] | None
    """log pi'(y_t | s_t), the trainer's own before the update; None where the preset needs none."""
    advantages: Float64[Tensor, " T"]
    """A_t."""
    ratio: Float64[Tensor, " T"]
    """r_t of the preset, before any cut, without gradient."""
    divergence: Float64[Tensor, " T"] | None
    """The preset's D, without gradient."""
    mask: Bool[Tensor, " T"]
    """M_t: rows that are trained and that the preset's trust region does not block."""
    loss_mask: Bool[Tensor, " T"]
    """Rows that are trained."""
    sequence_ids: Int[Tensor, " T"] | None
    """Sequence of each row, where the preset's ratios are of whole sequences."""
    preset: Preset
    """Its constants: `ratio_cap`, thresholds."""


OwnLoss = Callable[[LossInputs], "Tensor | tuple[Tensor, Tensor]"]


def own_loss(preset: Preset, inputs: LossInputs) -> tuple[Float[Tensor, " T"], Bool[Tensor, " T"]]:
    """The loss of `preset.loss`, `[T]`, and the rows that it keeps.

    The function returns the loss of each row, to be minimised after the run's aggregation, with gradient through
    `logp` and `entropy` alone, and may return with it a boolean mask `[T]` of the rows that it keeps. Rows that either
    mask leaves out contribute exactly 0 by selection, whatever the function says of them. A row that is kept and not
    finite stays so, and the step is skipped as for any other loss. No collective.

    Raises ValueError where the function returns another shape, a mask that is not boolean, or no gradient.
    """
    assert preset.loss is not None
    function: OwnLoss = load_callable(preset.loss, named="algorithm.loss=")
    found = function(inputs)
    loss, kept = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    rows = list(inputs.logp.shape)
    if not isinstance(loss, Tensor) or list(loss.shape) != rows or not loss.is_floating_point():
        raise ValueError(f"must return one floating number per row, {rows}, and returned {_said(loss)}")
    if kept is not None and (not isinstance(kept, Tensor) or list(kept.shape) != rows or kept.dtype != torch.bool):
        raise ValueError(f"its mask must be boolean, {rows}, since no gradient may reach it, and is {_said(kept)}")
    if inputs.logp.requires_grad and not loss.requires_grad:
        raise ValueError("returned a loss without gradient: it must depend on logp, which nothing may detach")
    mask = inputs.mask if kept is None else inputs.mask & kept
    return torch.where(mask, loss, 0.0), mask


def _said(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def try_own_code(preset: Preset) -> None:
    """Call a divergence and a loss of the user's own on made-up rows, before anything is trained.

    Raises PresetError, naming the path, where one raises, returns the wrong shape or something that is not finite for
    probabilities between 1e-9 and 1, or where a gradient reaches a row that is masked or not trained.
    """
    generator = torch.Generator().manual_seed(0)
    for rows in (12, 1):
        inputs = _made_up(preset, rows, generator)
        if preset.divergence is not None and ":" in preset.divergence:
            _attempt(f"algorithm.divergence={preset.divergence}", lambda i=inputs: _try_divergence(preset, i))  # type: ignore[misc]
        if preset.loss is not None:
            _attempt(f"algorithm.loss={preset.loss}", lambda i=inputs: _try_loss(preset, i))  # type: ignore[misc]


def _attempt(who: str, work: Callable[[], None]) -> None:
    try:
        work()
    except Exception as error:
        raised = "" if type(error) is ValueError else f"raised {type(error).__name__}: "
        raise PresetError(f"{who}: {raised}{error}; docs/algorithms.md says what is asked of it") from error


def _made_up(preset: Preset, rows: int, generator: torch.Generator) -> LossInputs:
    """Rows of all kinds: certain and unlikely tokens, both signs, masked, not trained."""
    likely = torch.tensor([1.0, 0.5, 1e-9, 0.9, 1e-3, 0.2], dtype=torch.float64).repeat(2)[:rows]
    logp = (likely * (0.5 + 0.5 * torch.rand(rows, generator=generator).double())).log()
    number = torch.arange(rows)
    loss_mask = (number % 5 != 4) | (rows == 1)
    mask = loss_mask & (number % 5 != 2)
    zero = torch.zeros(rows, dtype=torch.float64)
    return LossInputs(
        logp=torch.where(loss_mask, logp, zero).requires_grad_(),
        entropy=torch.where(loss_mask, zero + 0.7, zero).requires_grad_(),
        mu_logp=torch.where(loss_mask, likely.log(), zero),
        recomputed_logp=torch.where(loss_mask, likely.log() - 0.1, zero) if preset.needs_recomputed_logp else None,
        advantages=torch.where(loss_mask, torch.tensor([1.0, -1.0, 0.0]).double().repeat(4)[:rows], zero),
        ratio=torch.where(loss_mask, (logp - likely.log()).exp(), zero + 1.0),
        divergence=None if preset.divergence is None else zero + 0.01,
        mask=mask,
        loss_mask=loss_mask,
        sequence_ids=number // 4,
        preset=preset,
    )


def _try_divergence(preset: Preset, inputs: LossInputs) -> None:
    row = preset.divergence_row
    assert row is not None
    topk: dict[str, Any] = {}
    if preset.needs_topk:
        rows, columns = len(inputs.mu_logp), (preset.topk or 1) + 1
        tail = torch.full((rows, columns), -1.0, dtype=torch.float64).cumsum(-1) - 2.0
        member = torch.ones(rows, columns, dtype=torch.bool)
        topk = {"anchor_topk_logp": tail, "topk_logp": tail - 0.1, "member": member}
    found = row(DivergenceInputs(anchor_logp=inputs.mu_logp, logp=inputs.logp.detach(), **topk))
    if not found.isfinite().all():
        raise ValueError(f"returned {found[~found.isfinite()][0]} for ordinary probabilities")


def _try_loss(preset: Preset, inputs: LossInputs) -> None:
    loss, mask = own_loss(preset, inputs)
    if not loss.isfinite().all():
        raise ValueError(f"returned {loss[~loss.isfinite()][0]} for ordinary probabilities")
    assert inputs.entropy is not None
    gradients = torch.autograd.grad(loss.sum(), (inputs.logp, inputs.entropy), allow_unused=True)
    for name, gradient in zip(("logp", "entropy"), gradients, strict=True):
        if gradient is None:
            continue
        if not gradient.isfinite().all():
            raise ValueError(f"its gradient to {name} is not finite for ordinary probabilities")
        if (reached := (gradient != 0) & ~mask).any():
            raise ValueError(
                f"a gradient to {name} reaches {int(reached.sum())} rows that are masked or not trained, through the "
                "loss of other rows: select with torch.where before summing over rows"
            )
