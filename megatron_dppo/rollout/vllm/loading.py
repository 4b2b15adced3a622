"""From buckets to vLLM's layers: dense tensors by name, the experts of a layer with one call per matrix."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from megatron_dppo.checkpoint.weight_layout import EXPERT, TensorSlot, unpack


class BucketLoader:
    """Loads the slots of one sync into a model, copying what it keeps, so that a bucket's memory may be used again.

    vLLM loads and post-processes a layer when all of its tensors have come (layerwise reloading); per expert that costs
    a tenth of a millisecond of Python for each of three matrices, for 128 experts ten times what NVLink needs for their
    bytes. A stack of experts is collected here and handed over in one call per matrix: vLLM's expert loader takes
    `[experts, rows, columns]` as well and cuts this worker's tensor-parallel share. An expert-parallel worker collects
    its own experts and drops the others. Memory: the tensors of layers that are not complete yet.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._model: Any = model
        self._device = device
        found = [(path, module) for path, module in model.named_modules() if isinstance(module, RoutedExperts)]
        # By vLLM's name and by its place in the model: checkpoints of MiniMax have the latter.
        self._experts = {module.layer_name: module for _, module in found}
        self._experts |= {path.removesuffix(".routed_experts"): module for path, module in found}
        self._places = {layer.layer_name: _places(layer) for layer in self._experts.values()}
        """Where each expert of a layer is among this worker's; -1 for another worker's."""
        self._stacks: dict[str, torch.Tensor] = {}
        self._missing: dict[str, int] = {}

    def load(self, slots: Iterable[TensorSlot], payload: torch.Tensor) -> None:
        """Load a bucket. `payload`: uint8, on any device; on a GPU asynchronous, in the current stream's order."""
        dense: list[tuple[str, torch.Tensor]] = []
        for slot, tensor in unpack(slots, payload):
            if slot.experts is None:
                dense.append((slot.name, self._keep(tensor)))
            elif (layer := self._layer_of(slot)) is None:
                dense.extend(zip(slot.names(), self._keep(tensor).unbind(), strict=True))
            else:
                self._collect(layer, slot, tensor)
        if dense:
            self._model.load_weights(dense)

    def drop(self) -> None:
        """Forget stacks that are not complete."""
        self._stacks.clear()
        self._missing.clear()

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=self._device).copy_(tensor, non_blocking=True)

    def _layer_of(self, slot: TensorSlot) -> RoutedExperts | None:
        """vLLM's experts of the slot's layer; None where the layer needs its matrices one by one."""
        prefix, _, matrix = slot.name.partition(f".{EXPERT}.")
        layer = self._experts.get(prefix)
        if layer is None or matrix not in _matrices(layer):
            return None
        redundant = layer.moe_config.num_experts - layer.moe_config.num_logical_experts
        return None if redundant else layer

    def _collect(self, layer: RoutedExperts, slot: TensorSlot, tensor: torch.Tensor) -> None:
        assert slot.experts is not None
        places, local = self._places[layer.layer_name], layer.local_num_experts
        first, stop = slot.experts
        rows = [(number - first, places[number]) for number in range(first, stop) if places[number] >= 0]
        if not rows:
            return
        stack = self._stacks.get(slot.name)
        if stack is None:
            stack = torch.empty((local, *slot.shape), dtype=tensor.dtype, device=self._device)
            self._stacks[slot.name], self._missing[slot.name] = stack, local
        for source, target, count in _runs(rows):
            stack[target : target + count].copy_(tensor[source : source + count], non_blocking=True)
        self._missing[slot.name] -= len(rows)
        if self._missing[slot.name] == 0:
            del self._missing[slot.name]
            name, shard = _matrices(layer)[slot.name.partition(f".{EXPERT}.")[2]]
            parameter = getattr(layer, name)
            parameter.weight_loader(
                param=parameter,
                loaded_weight=self._stacks.pop(slot.name),
                weight_name=f"{layer.layer_name}.{name}",
                shard_id=shard,
                expert_id=next(number for number, place in enumerate(places) if place >= 0),  # others are ignored
                return_success=True,
            )


def _matrices(layer: RoutedExperts) -> dict[str, tuple[str, str]]:
    """vLLM's parameter and shard of each matrix of an expert, by the name that its model says a checkpoint has."""
    return {
        f"{layer.ckpt_gate_proj_name}.weight": ("w13_weight", "w1"),
        f"{layer.ckpt_up_proj_name}.weight": ("w13_weight", "w3"),
        f"{layer.ckpt_down_proj_name}.weight": ("w2_weight", "w2"),
    }


def _places(layer: RoutedExperts) -> list[int]:
    manager = layer.expert_map_manager
    return [int(manager.map_global_to_local(number)) for number in range(layer.moe_config.num_experts)]


def _runs(rows: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(source, target, count) of consecutive rows."""
    runs: list[tuple[int, int, int]] = []
    for source, target in rows:
        if runs and (source - runs[-1][0], target - runs[-1][1]) == (runs[-1][2], runs[-1][2]):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((source, target, 1))
    return runs
