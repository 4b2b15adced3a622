"""Adapters in a training state: the base weights come from the Hugging Face folder that the run names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_dppo.models.hf_config import HFConfig
from megatron_dppo.models.live import unwrap
from megatron_dppo.models.lora.adapter import LoraAdapter


def sharded_adapters(
    chunk: torch.nn.Module, model: HFConfig, groups: ProcessGroupCollection
) -> dict[str, ShardedTensor]:
    """The adapters of one chunk by parameter name, under keys and in shapes of the whole model, so that any layout
    (and either layer spec) can load them: axis 0 is the layer's experts, axis 2 what tensor parallelism divides."""
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
