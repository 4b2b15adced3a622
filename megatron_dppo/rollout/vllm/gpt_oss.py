"""Weights of gpt-oss into a running vLLM, whose model copies them past the loaders that a reload waits for."""

from __future__ import annotations

from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.weight_utils import default_weight_loader, remap_moe_expert_weights


def mend_reload(model: torch.nn.Module) -> None:
    """vLLM 0.26's `GptOssModel` writes sinks and experts with `parameter.copy_(...)`. Between the beginning and the end
    of a reload parameters are on meta and their `weight_loader` keeps what comes: those weights would be lost. Here
    they go through the loaders, which copy. Nothing happens to other models."""
    for module in model.modules():
        if type(module).__name__ != "GptOssModel":
            continue
        model_of_layers: Any = module
        model_of_layers._load_weights_other = MethodType(_load, module)
        for layer in module.modules():
            if isinstance(layer, RoutedExperts):
                for parameter in get_layerwise_info(layer).restore_metadata[0].values():
                    parameter.weight_loader = default_weight_loader


def _load(
    self: Any,
    ep_rank_end: int,
    ep_rank_start: int,
    heads_per_rank: int,
    head_start: int,
    weights: Iterable[tuple[str, torch.Tensor]],
    stacked_params_mapping: list[tuple[str, ...]],
) -> set[str]:
    parameters, rest, loaded = dict(self.named_parameters()), [], set()
    divided = not self.parallel_config.enable_expert_parallel
    rank = get_tensor_model_parallel_rank()
    for name, weight in remap_moe_expert_weights(weights, parameters):
        kind = name.rpartition(".")[2]
        if kind == "sinks":
            share = weight.narrow(0, head_start, heads_per_rank)
        elif kind in ("w13_weight", "w13_bias", "w2_weight", "w2_bias"):
            share = weight if divided else weight[ep_rank_start:ep_rank_end]
            if kind.endswith("_weight"):
                share = share.transpose(1, 2)  # outputs are last in checkpoints
            if divided:
                share = _share_of(rank, share, kind, parameters[name].shape)
        else:
            rest.append((name, weight))
            continue
        parameter = parameters[name]
        getattr(parameter, "weight_loader", default_weight_loader)(parameter, share)
        loaded.add(name)
    further = (ep_rank_end, ep_rank_start, heads_per_rank, head_start, rest, stacked_params_mapping)
    return loaded | type(self)._load_weights_other(self, *further)


def _share_of(rank: int, whole: torch.Tensor, kind: str, shape: torch.Size) -> torch.Tensor:
    """A tensor-parallel rank's share of experts: outputs of the first matrix, inputs of the second. The second's bias
    is added once."""
    if kind == "w2_bias":
        return whole if rank == 0 else torch.zeros_like(whole)
    dim = 2 if kind == "w2_weight" else 1
    return whole.narrow(dim, rank * shape[dim], shape[dim])
