"""Which parameters of the whole model the chunks of this rank hold, and which part of each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_dppo.models.hf_config import HFConfig
from megatron_dppo.models.names import Block, Piece, Shape, is_expert

ADAPTER = "lora"
"""Attribute of a layer under which its adapter is (`megatron_dppo.models.lora`)."""

# TransformerEngine fuses a norm into the linear layer after it, and numbers experts within one grouped module.
_TE_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.in_proj.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_LOCAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_GLOBAL_EXPERT = re.compile(r"mlp\.experts\.(\d+)\..+")
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)")


class Adapter(Protocol):
    """What is added to a frozen weight."""

    def delta(self, tensor: str, local: Block) -> torch.Tensor:
        """On a block of the weight that is one of Hugging Face's `tensor`."""
        ...


@dataclass(frozen=True)
class Owned:
    """One parameter of this rank, or a buffer that checkpoints hold. `name` is global (layer and expert numbers of the
    whole model, local-spec names)."""

    name: str
    parameter: torch.Tensor
    pieces: tuple[Piece, ...]
    shape: Shape
    adapter: Adapter | None = None

    def block(self, piece: Piece) -> torch.Tensor:
        """What the model computes with on a piece, as the Hugging Face tensor has it: the parameter, or a new tensor,
        its adapter added in float32."""
        value = self.parameter[tuple(slice(*span) for span in piece.local)]
        if self.adapter is not None:
            value = self.adapter.delta(piece.hf_name, piece.local).add_(value)
        return piece.to_tensor(value)


def unwrap(module: torch.nn.Module) -> GPTModel:
    """The GPTModel inside DistributedDataParallel and precision wrappers."""
    while hasattr(module, "module"):
        module = module.module  # type: ignore[assignment]
    assert isinstance(module, GPTModel)
    return module


def buffers(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Those that checkpoints hold, by their names in the chunk: the correction biases of its routers."""
    return ((name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(".expert_bias"))


def owned_parameters(
    models: Sequence[torch.nn.Module], model: HFConfig, groups: ProcessGroupCollection, *, stacked: bool = False
) -> Iterator[Owned]:
    """Every parameter of this rank's chunks and then its `buffers`, chunk by chunk, with their adapters where they have
    some. `stacked`: pieces are those of a checkpoint that holds all experts of a layer in one tensor.

    Raises RuntimeError where the family's table and the layer spec disagree: a parameter the table does not know, or
    one it has for these layers that the chunks lack.
    """
    transforms = dict(model.parameters(stacked=stacked))
    experts = model.moe.experts // groups.ep.size() if model.moe else 0
    first_expert = experts * groups.ep.rank() if model.moe else 0
    for chunk in models:
        gpt = unwrap(chunk)
        numbers = [layer.layer_number - 1 for layer in gpt.decoder.layers]
        missing = _expected(transforms, gpt, set(numbers), range(first_expert, first_expert + experts))
        for local_name, parameter in (*gpt.named_parameters(), *buffers(gpt)):
            if ADAPTER in local_name.split("."):
                continue
            name = _global_name(local_name, numbers, first_expert)
            if name not in missing:
                raise RuntimeError(f"{model.family.model_type} has no table entry for {name} ({local_name} here)")
            missing.remove(name)
            group = groups.expt_tp if is_expert(name) else groups.tp
            part, parts = group.rank(), group.size()
            pieces = tuple(transforms[name].pieces(model, part, parts))
            layer = gpt.get_submodule(local_name.rpartition(".")[0])
            # A layer's norm or bias has none.
            adapter = getattr(layer, ADAPTER, None) if parameter.ndim == 2 else None
            yield Owned(name, parameter, pieces, transforms[name].shape(model, parts), adapter)
        if missing:
            raise RuntimeError(f"{len(missing)} parameters of the table are not in this chunk: {sorted(missing)[:5]}")


def _expected(names: Iterable[str], gpt: GPTModel, layers: set[int], experts: range) -> set[str]:
    """Names a chunk with these layers and experts must have."""

    def belongs(name: str) -> bool:
        if match := _LAYER.fullmatch(name):
            expert = _GLOBAL_EXPERT.fullmatch(match[2])
            return int(match[1]) in layers and (expert is None or int(expert[1]) in experts)
        if name.startswith("embedding."):
            return gpt.pre_process
        if name.startswith("output_layer.") and gpt.share_embeddings_and_output_weights and gpt.pre_process:
            return False  # the embedding itself
        return gpt.post_process

    return {name for name in names if belongs(name)}


def _global_name(name: str, layer_numbers: list[int], first_expert: int) -> str:
    match = _LAYER.fullmatch(name)
    if not match:
        return name
    layer, rest = layer_numbers[int(match[1])], match[2]
    rest = _TE_NORMS.get(rest, rest)
    if expert := _LOCAL_EXPERT.fullmatch(rest):
        rest = f"mlp.experts.{first_expert + int(expert[1])}.{expert[2]}"
    elif expert := _GROUPED_EXPERT.fullmatch(rest):
        rest = f"mlp.experts.{first_expert + int(expert[3])}.{expert[1]}.{expert[2]}"
    return f"decoder.layers.{layer}.{rest}"
