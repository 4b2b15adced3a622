"""Auxiliary losses of the routers, off unless the configuration gives them a coefficient."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

from megatron_dppo.actor.config import ActorConfig

_NAMES = {"load_balancing_loss": "load_balancing_loss", "z_loss": "router_z_loss"}
"""Megatron-Core's name of each loss to ours."""


class AuxiliaryLosses:
    """Gives Megatron-Core's router losses the weight that belongs to a loss that is divided beforehand.

        loss of a mini-batch = policy loss + sum over MoE layers and microbatches m of (n_m / N)
                               (load_balancing_loss * E sum_e f_me P_me + router_z_loss * mean_t (logsumexp_e z_te)^2)

    `n_m` rows of microbatch `m` and `N` of all of the mini-batch, padding included. Over the rows of a microbatch, all
    tensor- and context-parallel ranks together, `f_me` is the share of the assignments that go to expert `e` by the
    live top-k (also where recorded routes are replayed), without gradient, and `P_me` the mean probability (Switch
    Transformer; the z-loss is ST-MoE's). The z-loss does not depend on how rows are divided into microbatches; the
    load-balancing loss, a product of two means, does.

    Padding counts because Megatron-Core 0.19's `padding_mask` is not exact: what each tensor- and context-parallel rank
    adds would weigh as its own rows, not all ranks' together, later pipeline stages do not cut the mask as their rows
    are cut, a pack of padding alone would be divided by 0, and experts with biases do not take it.

    With `calculate_per_token_loss` Megatron-Core multiplies what it attaches to a router by the microbatch's rows and
    leaves the division to a reduction that is switched off here. So the coefficients are divided by `N` before every
    mini-batch. The schedule applies float16's loss scale to them.
    """

    def __init__(self, config: ActorConfig, model_config: Any) -> None:
        moe = model_config.num_moe_experts is not None
        self._balance = config.load_balancing_loss if moe else 0.0
        self._z = config.router_z_loss if moe else 0.0
        self._config = model_config
        self._sums: dict[str, float] = {}
        self._steps = 0

    @property
    def on(self) -> bool:
        return self._balance > 0 or self._z > 0

    def start(self, rows: int) -> None:
        """Before a mini-batch of `rows` rows in all its packs, on all ranks."""
        if not self.on:
            return
        self._config.moe_aux_loss_coeff = self._balance / rows
        self._config.moe_z_loss_coeff = self._z / rows if self._z else None
        get_moe_metrics_tracker().clear()

    def finish(self, microbatches: int) -> None:
        """After it. Collective over the job: mean over layers, microbatches and data-parallel ranks."""
        if not self.on:
            return
        wanted = [name for name, weight in (("load_balancing_loss", self._balance), ("z_loss", self._z)) if weight]
        totals: dict[str, torch.Tensor] = {}
        get_moe_metrics_tracker().report(
            loss_scale=1 / microbatches,
            iteration=self._steps,
            force_initialize=True,  # pipeline stages without MoE layers take part
            track_names=wanted,
            num_layers=self._config.num_layers,
            moe_layer_freq=self._config.moe_layer_freq,
            total_loss_dict=totals,
        )
        self._steps += 1
        for name, value in totals.items():
            self._sums[_NAMES[name]] = self._sums.get(_NAMES[name], 0.0) + float(value)

    def metrics(self) -> dict[str, float]:
        """`moe/load_balancing_loss` (1 is balanced) and `moe/router_z_loss` without their coefficients: means over the
        mini-batches since the last call."""
        found = {f"moe/{name}": value / self._steps for name, value in self._sums.items()}
        self._sums, self._steps = {}, 0
        return found
