"""Checkpointing of Megatron-Core's DistributedOptimizer around torch's own Adam (no Apex, no TransformerEngine)."""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def patch_distributed_optimizer() -> None:
    """Four faults of the stock class with torch's Adam:

    - before the first step Adam has no state, and `state_dict` asserts on it: moments of zero at step 0 are created,
      which is what the first step itself would start from;
    - a shard without parameters has no step to report: its groups' is taken;
    - after `load_state_dict` all parameters share one step tensor, which every parameter's update then increments:
      each gets its own;
    - loaded moments are expected to bring a step per parameter, which the reshardable format keeps elsewhere.
    """
    stock_state_dict = DistributedOptimizer.state_dict
    stock_load = DistributedOptimizer.load_state_dict
    stock_set = DistributedOptimizer._set_main_param_and_optimizer_states

    @functools.wraps(stock_state_dict)
    def state_dict(self: DistributedOptimizer) -> dict[str, Any]:
        adam = self.optimizer
        _create_missing_state(adam)
        if adam.state:
            return stock_state_dict(self)
        inner = adam.state_dict()
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "step": group.get("step", 0.0)}
            for group in inner["param_groups"]
        ]
        state: dict[str, Any] = {"optimizer": {"param_groups": groups}}
        if self.grad_scaler:
            state["grad_scaler"] = self.grad_scaler.state_dict()
        return state

    @functools.wraps(stock_load)
    def load_state_dict(self: DistributedOptimizer, state: dict[str, Any]) -> None:
        stock_load(self, state)
        for moments in self.optimizer.state.values():
            if torch.is_tensor(moments.get("step")):
                moments["step"] = moments["step"].clone()

    @functools.wraps(stock_set)
    def set_states(self: DistributedOptimizer, model_param: torch.nn.Parameter, tensors: dict[str, Any]) -> None:
        stock_set(self, model_param, {"step": None, **tensors})  # what is no tensor is left as it is

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states
    DistributedOptimizer.state_dict = state_dict
    DistributedOptimizer.load_state_dict = load_state_dict


def _create_missing_state(adam: torch.optim.Optimizer) -> None:
    if not isinstance(adam, torch.optim.Adam):
        return
    for group in adam.param_groups:
        for parameter in group["params"]:
            if parameter not in adam.state:
                adam.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
