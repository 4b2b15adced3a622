"""Parameters of a rank by part, as Megatron-Core allocates them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from megatron_dppo.models.hf_config import HFConfig
from megatron_dppo.models.lora.config import LoraConfig
from megatron_dppo.models.lora.size import adapter_sizes
from megatron_dppo.models.names import Buffer, is_expert
from megatron_dppo.models.parallel import ParallelConfig, uneven_layout

_PARTS = (("norm", "norms"), (".self_attention.", "attention"), (".router.", "router"), (".mlp.", "mlp"))
"""Which of `Parameters` a name belongs to: the first that fits."""


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters by part. Expert parameters are reduced over other ranks than the rest."""

    embedding: int = 0
    attention: int = 0
    """Query-key-value and output projections, biases included."""
    norms: int = 0
    router: int = 0
    experts: int = 0
    mlp: int = 0
    """Dense feed-forward layers, and the experts that every token passes."""
    head: int = 0
    """Output layer; with tied weights only where the embedding is on another rank."""

    @property
    def dense(self) -> int:
        """All but the experts: replicated over data-parallel and context-parallel ranks."""
        return self.total - self.experts

    @property
    def total(self) -> int:
        return sum(vars(self).values())

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def __mul__(self, count: int) -> Parameters:
        return Parameters(**{name: value * count for name, value in vars(self).items()})


@dataclass(frozen=True)
class StageLayers:
    """The decoder layers of one pipeline stage. Layers differ in whether they have experts, and attention, and in
    how far that looks back."""

    chunks: tuple[tuple[int, ...], ...]
    """Numbers of the layers (from 0) of each model chunk."""

    def kinds(self, model: HFConfig) -> list[tuple[int, int]]:
        """(a layer, how many of its kind), chunk by chunk."""
        return [kind for chunk in self.chunks for kind in _kinds(model, chunk)]

    def divided(self, model: HFConfig, first: int) -> list[tuple[list[tuple[int, int]], list[tuple[int, int]]]]:
        """Of each chunk the same of its first `first` layers, and of its others."""
        return [(_kinds(model, chunk[:first]), _kinds(model, chunk[first:])) for chunk in self.chunks]


def _kinds(model: HFConfig, chunk: tuple[int, ...]) -> list[tuple[int, int]]:
    kinds: dict[tuple[bool, bool, int | None], list[int]] = {}
    for layer in sorted(chunk, key=lambda layer: not model.is_moe_layer(layer)):
        kind = (model.is_moe_layer(layer), model.is_delta_layer(layer), model.window(layer))
        kinds.setdefault(kind, []).append(layer)
    return [(layers[0], len(layers)) for layers in kinds.values()]


def stage_layers(layers: int, parallel: ParallelConfig) -> tuple[StageLayers, ...]:
    """The layers of every stage. Chunk `c` of stage `s` is part `c * stages + s` of the model, as in Megatron-Core."""
    return _stage_layers(layers, parallel.pipeline, parallel.chunks)


@lru_cache(maxsize=1024)
def _stage_layers(layers: int, stages: int, chunks: int) -> tuple[StageLayers, ...]:
    layout = uneven_layout(layers, stages, chunks)
    if layout is None:
        counts = [layers // (stages * chunks)] * (stages * chunks)
    else:
        counts = [part.count("decoder") for part in layout]
    starts = [sum(counts[:i]) for i in range(len(counts))]
    parts = [tuple(range(start, start + count)) for start, count in zip(starts, counts, strict=True)]
    return tuple(
        StageLayers(tuple(parts[chunk * stages + stage] for chunk in range(chunks))) for stage in range(stages)
    )


def layer_parameters(model: HFConfig, parallel: ParallelConfig, layer: int) -> Parameters:
    """Of one decoder layer on one rank: what the family's table has for it, but no buffers."""
    counts: Counter[str] = Counter()
    for name, transform in model.layer_tables[layer].items():
        if isinstance(transform, Buffer):
            continue
        if model.moe is not None and is_expert(name):
            one = prod(transform.shape(model, parallel.expert_tensor))
            counts["experts"] += model.moe.experts // parallel.expert * one
        else:
            part = next(part for mark, part in _PARTS if mark in name)
            counts[part] += prod(transform.shape(model, parallel.tensor))
    return Parameters(**counts)


def stage_parameters(model: HFConfig, parallel: ParallelConfig, stage: int) -> Parameters:
    """Of every rank of pipeline stage `stage`."""
    total = Parameters()
    for layer, count in stage_layers(model.layers, parallel)[stage].kinds(model):
        total += layer_parameters(model, parallel, layer) * count
    vocabulary = model.padded_vocab_size(parallel.tensor) // parallel.tensor * model.hidden_size
    last = stage == parallel.pipeline - 1
    if stage == 0:
        total += Parameters(embedding=vocabulary)
    if last:
        shared = model.tied and stage == 0
        total += Parameters(norms=model.hidden_size, head=0 if shared else vocabulary)
    return total


def stage_adapters(model: HFConfig, parallel: ParallelConfig, stage: int, lora: LoraConfig) -> Parameters:
    """Of the adapters on every rank of pipeline stage `stage`, by the part of the layer that they are on."""
    total = Parameters()
    for layer, count in stage_layers(model.layers, parallel)[stage].kinds(model):
        sizes: Counter[str] = Counter()
        for size in adapter_sizes(model, parallel, layer, lora):
            sizes["attention" if size.target in ("qkv", "o") else size.target] += size.parameters(lora.rank)
        total += Parameters(**sizes) * count
    return total


def trained_parameters(model: HFConfig, parallel: ParallelConfig, stage: int, lora: LoraConfig | None) -> Parameters:
    """What has gradients and optimizer state on every rank of a stage: the adapters, or everything."""
    return stage_adapters(model, parallel, stage, lora) if lora else stage_parameters(model, parallel, stage)


def whole_model(model: HFConfig) -> Parameters:
    """Of the model on one rank, the vocabulary padded."""
    return stage_parameters(model, ParallelConfig(), 0)


def exported(model: HFConfig) -> int:
    """Parameters of the Hugging Face checkpoint: those of the model without the vocabulary's padding."""
    padding = (model.padded_vocab_size(1) - model.vocab_size) * model.hidden_size
    return whole_model(model).total - padding * (1 if model.tied else 2)


def active_per_token(model: HFConfig) -> int:
    """Parameters a token is multiplied with, without embedding and head."""
    return model.active_parameters - model.vocab_size * model.hidden_size
