"""AdamW over all parameters of an optimizer in one launch, clipping and the cast to 16 bits included."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_dppo.router_replay.replay import to_device

_ALIGNMENT = 16
"""Bytes of an address and elements of a tensor that let a kernel load 16 bytes at a time."""


@dataclass(frozen=True)
class _Table:
    """What the kernels read about the tensors of one parameter group (`adam_kernels`)."""

    group: dict[str, Any]
    rows: Tensor
    first: Tensor
    tensors: int
    blocks: int
    half: torch.dtype
    aligned: bool


_recorded = torch._C._profiler._RecordFunctionFast
"""An operator's name around a kernel of ours: profilers assign a kernel to the operator that launched it, and one that
is launched outside of any to nothing."""


class FusedAdam:
    """Steps a TransformerEngine `FusedAdam` in place of its own `step`: the same arithmetic, state and step count.

    Each parameter's numbers are read and written once: gradient, master weight and moments, and the weight's 16 bits,
    30 bytes a parameter, where clipping, Adam and the cast one after the other move 42. TransformerEngine launches a
    kernel per 110 tensors from lists that Python makes; here the addresses go to the device in one table, made while
    the backward still runs there.
    """

    @staticmethod
    def fits(inner: Any) -> bool:
        """Whether an optimizer is one that this class steps."""
        return (
            type(inner).__module__.startswith("transformer_engine.")
            and type(inner).__name__ == "FusedAdam"
            and bool(inner.adam_w_mode)
            and not (inner.capturable or inner.master_weights or inner.use_decoupled_grad)
        )

    def __init__(self, inner: Any, weights: Mapping[int, Tensor], counted: frozenset[int]) -> None:
        """
        inner    with float32 parameters, whose `grad` is set before `prepare`
        weights  by id of the parameter: what its values are also written to, rounded
        counted  ids of the parameters whose gradients count for the norm on this rank
        """
        self._inner, self._weights, self._counted = inner, weights, counted
        self._tables: list[_Table] | None = None
        self._square: Tensor | None = None

    @torch.no_grad()
    def prepare(self, *, norm: bool = False) -> None:
        """Tell the device where everything is. Addresses may change from step to step (`Offloader`, a resumed state),
        so this comes before each; it waits for nothing.

        norm  the gradients are final: the device can sum their squares now, while the host does something else"""
        self._tables = list(self._make())
        self._square = self._sum_of_squares() if norm else None

    def _make(self) -> Iterator[_Table]:
        from megatron_dppo.actor.adam_kernels import BLOCK

        state = self._inner.state
        for group in self._inner.param_groups:
            rows, half = [], torch.bfloat16
            for parameter in group["params"]:
                if not parameter.numel() or parameter.grad is None:
                    continue
                if not state[parameter]:
                    self._inner.initialize_state(parameter, False)
                weight, moments = self._weights.get(id(parameter)), state[parameter]
                half = half if weight is None else weight.dtype
                rows.append(
                    (
                        parameter.grad.data_ptr(),
                        parameter.data_ptr(),
                        moments["exp_avg"].data_ptr(),
                        moments["exp_avg_sq"].data_ptr(),
                        0 if weight is None else weight.data_ptr(),
                        parameter.numel(),
                        int(id(parameter) in self._counted),
                    )
                )
            if not rows:
                continue
            table, device = np.array(rows, dtype=np.int64), group["params"][0].device
            first = np.append(0, np.cumsum(-(-table[:, 5] // BLOCK)))
            yield _Table(
                group,
                to_device(table, device),
                to_device(first.astype(np.int32), device),
                tensors=len(rows),
                blocks=int(first[-1]),
                half=half,
                aligned=not (table[:, :6] % _ALIGNMENT).any(),
            )

    def square_norm(self) -> Tensor:
        """The sum of the squares of the gradients that count, float32."""
        return self._sum_of_squares() if self._square is None else self._square

    def _sum_of_squares(self) -> Tensor:
        from megatron_dppo.actor import adam_kernels

        sums = []
        for table in self._prepared():
            sums.append(torch.empty(table.blocks, dtype=torch.float32, device=table.rows.device))
            with _recorded("FusedAdam: norm"):
                adam_kernels.square_sums[(table.blocks,)](
                    table.rows, table.first, sums[-1], table.tensors, ALIGNED=table.aligned
                )
        return torch.stack([s.sum() for s in sums]).sum() if sums else torch.zeros((), device="cuda")

    def step(self, *, scale: float) -> None:
        """One step on `scale` times the gradients, which stay as they are."""
        import triton.language as tl

        from megatron_dppo.actor import adam_kernels

        dtypes = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
        for table in self._prepared():
            group = table.group
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            corrected = group["bias_correction"]
            with _recorded("FusedAdam: step"):
                adam_kernels.adamw[(table.blocks,)](
                    table.rows,
                    table.first,
                    table.tensors,
                    *(
                        float(value)
                        for value in (scale, group["lr"], beta1, beta2, group["eps"], group["weight_decay"])
                    ),
                    1 - beta1 ** group["step"] if corrected else 1.0,
                    1 - beta2 ** group["step"] if corrected else 1.0,
                    HALF=dtypes[table.half],
                    ALIGNED=table.aligned,
                )

    def forget(self) -> None:
        """Addresses and gradients are those of one step."""
        self._tables = self._square = None

    def _prepared(self) -> list[_Table]:
        if self._tables is None:
            self.prepare()
        assert self._tables is not None
        return self._tables
