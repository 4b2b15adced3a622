"""Adapters onto the layers of a model whose weights are loaded."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_dppo.models.hf_config import HFConfig
from megatron_dppo.models.live import ADAPTER, owned_parameters, unwrap
from megatron_dppo.models.lora.adapter import LoraAdapter, Sharding
from megatron_dppo.models.lora.config import LoraConfig
from megatron_dppo.models.lora.sites import LocalSite, peft_name, sites


def attach_adapters(
    models: Sequence[torch.nn.Module],
    model: HFConfig,
    groups: ProcessGroupCollection,
    config: LoraConfig,
    *,
    seed: int = 0,
) -> None:
    """Freeze every weight of this rank's chunks and give the targeted layers adapters: A uniform in
    `±1 / sqrt(in)` (PEFT's initialisation), B zero. Before DistributedDataParallel wraps the chunks.

    The numbers follow from `seed` and each projection's name, so they are the same in every layout. No collectives.
    """
    wanted = sites(model, config)
    sequence_parallel = unwrap(models[0]).config.sequence_parallel
    for chunk in models:
        held = {id(o.parameter): LocalSite(wanted[o.name], o) for o in owned_parameters([chunk], model, groups)
                if o.name in wanted}  # fmt: skip
        chunk.requires_grad_(False)
        for layer in list(chunk.modules()):
            weights = [p for p in layer.parameters(recurse=False) if id(p) in held]
            if not weights:
                continue
            # Experts in their order, in which their tokens come, not in that of registration.
            local = sorted((held[id(p)] for p in weights), key=lambda one: one.site.expert or 0)
            site = local[0].site
            expert = site.expert is not None
            sharding = Sharding(
                group=groups.expt_tp if expert else groups.tp,
                input_sharded=site.input_sharded,
                expert=expert,
                sequence_parallel=sequence_parallel and groups.tp.size() > 1,
            )
            adapter = LoraAdapter(local, config, sharding, weights[0])
            setattr(layer, ADAPTER, adapter)
            _add_output(layer, adapter, grouped=hasattr(layer, "num_gemms"))
        gpt = unwrap(chunk)
        if gpt.pre_process:
            gpt.embedding.register_forward_hook(_want_gradient)
    _initialise(adapters(models), seed)


def adapters(models: Iterable[torch.nn.Module]) -> Iterator[LoraAdapter]:
    """The adapters of these chunks, in the chunks' order."""
    for chunk in models:
        yield from (module for module in chunk.modules() if isinstance(module, LoraAdapter))


def _add_output(layer: torch.nn.Module, adapter: LoraAdapter, *, grouped: bool) -> None:
    # TransformerEngine's layer that holds the norm as well gives out what it normed: the adapter's input.
    normed = hasattr(layer, "return_layernorm_output")
    if normed:
        layer.return_layernorm_output = True  # type: ignore[assignment]

    def hook(_: torch.nn.Module, inputs: tuple[Any, ...], result: tuple[Any, Any]) -> tuple[torch.Tensor, Any]:
        output, bias = result
        x = inputs[0]
        if normed:
            output, x = output
        if grouped and adapter.joins(x, inputs[1]):
            return result  # experts in one launch have their adapter's share already
        if grouped:
            return adapter.add_to_grouped(output, x, inputs[1]), bias
        return adapter.add_to(output, x), bias

    layer.register_forward_hook(hook)


def _want_gradient(_: torch.nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    """A recomputed layer only has a backward where its input wants a gradient; a frozen embedding's output does not."""
    return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output


@torch.no_grad()
def _initialise(found: Iterable[LoraAdapter], seed: int) -> None:
    for adapter in found:
        (a, blocks), _ = adapter.pieces()
        sizes = {peft_name(t, "A"): shape[1] for one in adapter.local for t, shape in one.site.sources.items()}
        for piece in blocks:
            digest = hashlib.sha256(f"{seed}/{piece.hf_name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
            bound = 1 / math.sqrt(sizes[piece.hf_name])
            whole = torch.empty(adapter.rank, sizes[piece.hf_name]).uniform_(-bound, bound, generator=generator)
            source = whole[tuple(slice(*span) for span in piece.source)]
            a[tuple(slice(*span) for span in piece.local)] = source.to(a.dtype).to(a.device)
