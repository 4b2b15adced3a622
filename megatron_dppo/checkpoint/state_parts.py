"""What a training state holds beside a model's weights: adapters, the optimizer, random generators; in forms that any
layout can load, but for the generators, which are a rank's own."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron_dppo.errors import UserError
from megatron_dppo.models.hf_config import HFConfig
from megatron_dppo.models.live import unwrap
from megatron_dppo.models.lora.adapter import LoraAdapter

SHARDING = "fully_reshardable"


def distributed_parts(optimizer: MegatronOptimizer) -> list[DistributedOptimizer]:
    """The optimizers behind `optimizer`: one for dense and, with expert parallelism, one for expert parameters."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    parts = [part for part in parts if not getattr(part, "is_stub_optimizer", False)]
    for part in parts:
        if not isinstance(part, DistributedOptimizer):
            raise UserError(
                f"only Megatron-Core's distributed optimizer can be checkpointed, not {type(part).__name__}; set "
                "use_distributed_optimizer"
            )
    return parts


def sharded_optimizer_state(
    optimizer: MegatronOptimizer, model_state: dict[str, Any], groups: ProcessGroupCollection, *, is_loading: bool
) -> dict[str, Any]:
    """Master weights and moments of every parameter, sharded as the parameter itself is and keyed by its name.

    Stock keys also carry the number of the optimizer that held the parameter, which depends on the layout (experts have
    their own optimizer only under expert parallelism); those are left out. Collective over the data-parallel groups
    when saving.
    """
    metadata = {
        "distrib_optim_sharding_type": SHARDING,
        "dp_cp_group": groups.dp_cp,
        "chained_optim_avoid_prefix": True,
    }
    return {
        str(number): part.sharded_state_dict(model_state, is_loading=is_loading, metadata=metadata)["param_state"]
        for number, part in enumerate(distributed_parts(optimizer))
    }


def optimizer_step(optimizer: MegatronOptimizer) -> int:
    """Steps taken, agreed over all ranks (a rank may hold no parameter that was ever updated)."""
    steps = [
        int(group.get("step") or 0)
        for part in distributed_parts(optimizer)
        for group in part.state_dict()["optimizer"]["param_groups"]
    ]
    agreed = torch.tensor([max(steps, default=0)], dtype=torch.int64, device=torch.cuda.current_device())
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    return int(agreed.item())


def grad_scaler_state(optimizer: MegatronOptimizer) -> dict[str, float]:
    """The fp16 loss scale; empty for other precisions."""
    for part in distributed_parts(optimizer):
        if part.grad_scaler:
            state = part.grad_scaler.state_dict()
            return {k: float(v) for k, v in state.items()}
    return {}


def load_optimizer_state(
    optimizer: MegatronOptimizer, loaded: dict[str, Any], step: int, grad_scaler: dict[str, float]
) -> None:
    """Put loaded moments, master weights and the step count in place. Learning rate, betas and the like stay those of
    this run's config (the scheduler sets the rate before the next step)."""
    for number, part in enumerate(distributed_parts(optimizer)):
        state = part.state_dict()
        for group in state["optimizer"]["param_groups"]:
            group["step"] = step
        state["param_state"] = loaded[str(number)]
        state["param_state_sharding_type"] = SHARDING
        if part.grad_scaler and grad_scaler:
            device = part.grad_scaler.scale.device
            state["grad_scaler"] = {
                name: torch.tensor([value], device=device) if name == "scale" else int(value)
                for name, value in grad_scaler.items()
            }
        part.load_state_dict(state)
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            _weights_from_masters(part)
    if hasattr(optimizer, "_synchronize_steps"):
        optimizer._synchronize_steps()


@torch.no_grad()
def _weights_from_masters(part: DistributedOptimizer) -> None:
    """An optimizer on the host that never stepped makes its state by a step with random gradients before it loads one:
    the weights, which were loaded first, are to be what the loaded masters say."""
    for weight, master in part.optimizer.param_to_fp32_param.items():
        weight.copy_(master)
    for chunk in part.model_chunks:
        chunk.start_param_sync(force_sync=True)


def sharded_adapters(
    chunk: torch.nn.Module, model: HFConfig, groups: ProcessGroupCollection
) -> dict[str, ShardedTensor]:
    """The adapters of one chunk by parameter name, under keys and in shapes of the whole model, so that any layout
    (and either layer spec) can load them: axis 0 is the layer's experts, axis 2 what tensor parallelism divides. The
    base weights come from the Hugging Face folder that the run names."""
    state: dict[str, ShardedTensor] = {}
    for name, adapter in unwrap(chunk).named_modules():
        if not isinstance(adapter, LoraAdapter):
            continue
        site, group = adapter.local[0].site, adapter.sharding.group
        copies = groups.expt_dp if adapter.sharding.expert else groups.dp_cp
        experts = []
        if site.expert is not None:
            assert model.moe is not None
            here = len(adapter.local)
            experts = [(0, site.expert // here, model.moe.experts // here)]
        for suffix, parameter, sharded in (
            ("a", adapter.a, adapter.sharding.input_sharded),
            ("b", adapter.b, not adapter.sharding.input_sharded),
        ):
            state[f"{name}.{suffix}"] = ShardedTensor.from_rank_offsets(
                f"{site.key}.lora_{suffix}",
                parameter,
                *experts,
                *([(2, group.rank(), group.size())] if sharded else []),
                replica_id=(0, 0 if sharded else group.rank(), copies.rank()),
            )
    return state


def load_adapters(chunk: torch.nn.Module, loaded: Mapping[str, Any]) -> None:
    """Fill the adapters of one chunk; whatever else it holds stays."""
    found = unwrap(chunk).load_state_dict(loaded, strict=False)
    if found.unexpected_keys:
        raise RuntimeError(f"no such adapters: {found.unexpected_keys[:5]}")


def collect_rng() -> dict[str, Any]:
    """Python's, numpy's, torch's and the device's generators, and Megatron-Core's per-region states, as plain data
    (tensors, numbers, lists), so that loading runs no code."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002 (the global generator, for libraries)
    return {
        "python": [version, list(internal), gauss],
        "numpy": [str(name), [int(k) for k in keys], int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "regions": dict(get_cuda_rng_tracker().get_states()),
    }


def restore_rng(state: dict[str, Any]) -> None:
    """Undo everything that drew random numbers since `collect_rng`."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(state["torch"].cpu())
    torch.cuda.set_rng_state(state["device"].cpu())
    get_cuda_rng_tracker().set_states({name: value.cpu() for name, value in state["regions"].items()})
