"""What Megatron-Core takes for granted of NCCL, a GPU and TransformerEngine: uneven collectives, splits on a device,
checkpoints of its DistributedOptimizer around an Adam that is not torch's own."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.moe import token_dispatcher


def share_gloo_devices() -> None:
    """The devices of the first gloo group are those of all that follow. Each has a thread that wakes up a hundred times
    a second, and stock groups, of which Megatron-Core makes dozens, have devices of their own."""
    gloo: Any = dist.ProcessGroupGloo
    stock, devices = gloo.__init__, list[Any]()

    @functools.wraps(stock)
    def init(self: Any, store: dist.Store, rank: int, size: int, *args: Any, **kwargs: Any) -> None:
        match args, kwargs:
            case (), {"timeout": timedelta() as timeout, **rest} if devices and not rest:  # torch.distributed's call
                options = gloo._Options()
                options._devices, options._threads, options._timeout = devices, 2 * len(devices), timeout
                stock(self, store, rank, size, options)
            case _:
                stock(self, store, rank, size, *args, **kwargs)
                devices[:] = devices or self.options._devices

    gloo.__init__ = init


def patch_token_dispatcher() -> None:
    """All-to-all splits become numpy arrays: the stock helper converts CUDA tensors only, and the collective refuses
    tensors as split sizes."""

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_host


def patch_collectives() -> None:
    """`all_gather` and `reduce_scatter` of shards of unequal height, which gloo lacks: pad to the highest, then trim.

    They occur where tensor-parallel ranks of one expert hold different numbers of tokens (TP x EP x ETP, all-to-all).
    """
    stock_gather, stock_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather(
        input_: torch.Tensor,
        group: dist.ProcessGroup,
        output_split_sizes: Any = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return stock_gather(input_, group, output_split_sizes, use_global_buffer)
        heights = [int(n) for n in output_split_sizes]
        padded = _pad_rows(input_, max(heights))
        parts = [torch.empty_like(padded) for _ in heights]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:height] for part, height in zip(parts, heights, strict=True)])

    def reduce_scatter(
        input_: torch.Tensor,
        group: dist.ProcessGroup,
        input_split_sizes: Any = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return stock_scatter(input_, group, input_split_sizes, use_global_buffer)
        heights = [int(n) for n in input_split_sizes]
        parts = [_pad_rows(part, max(heights)) for part in torch.split(input_, heights)]
        output = torch.empty_like(parts[0])
        dist.reduce_scatter(output, parts, group=group)
        return output[: heights[group.rank()]].contiguous()

    mappings._gather_along_first_dim = gather
    mappings._reduce_scatter_along_first_dim = reduce_scatter


def _pad_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    padded = tensor.new_zeros(rows, *tensor.shape[1:])
    padded[: tensor.shape[0]] = tensor
    return padded


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
