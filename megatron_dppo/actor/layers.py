"""What is set on the layers of a built model before it is trained: where their weight gradients go, and what their
token dispatchers keep."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

_MADE_ONCE = frozenset({"sort_input_by_local_experts", "restore_output_by_local_experts", "over_budget"})
"""Tensors of a dispatcher that are no part of a microbatch."""


def fuse_weight_gradients(model_chunks: Iterable[torch.nn.Module], *, on: bool = True) -> None:
    """Let every TransformerEngine layer add `dy^T x` to its weight's float32 `main_grad` inside the matrix product.

    Otherwise the product is written in the weight's dtype, then read again and added by DistributedDataParallel's hook:
    a rounding to bfloat16 for every microbatch, one small kernel for every expert, and the traffic of both. The weights
    need a `main_grad`, so wrap the chunks first. Megatron-Core's own flag for this (`gradient_accumulation_fusion`)
    also covers its plain linear layers and refuses to build those without Apex's kernel; the LM head, the only plain
    one here, adds into `main_grad` by itself (`megatron_dppo.vocab_parallel.weight_grad`). Without TransformerEngine
    there is nothing to set, and frozen weights have no `main_grad`.
    """
    for chunk in model_chunks:
        for module in chunk.modules():
            if hasattr(module, "fuse_wgrad_accumulation") and any(
                p.requires_grad for p in module.parameters(recurse=False)
            ):
                module.fuse_wgrad_accumulation = on  # type: ignore[assignment]


def release_dispatched(chunks: Iterable[torch.nn.Module]) -> None:
    """From now on, dispatchers let go of a microbatch's tensors when their layer's forward returns. To be called once.

    By themselves they keep routing probabilities with their graph until the layer's next forward. Where layers are
    recomputed, the graph's leaf is the layer's input with its gradient, so that at the end of a backward every layer
    holds 2 x tokens x hidden in the model's dtype, and a row map (int32 [tokens, 2 experts + 1]) besides: on 48 layers
    of Qwen3-30B-A3B and packs of 16,384 tokens 7.8 GB per rank, and until the next step, while engines on the same GPU
    generate. What the backward needs is in the graph.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if hasattr(module, "token_dispatcher"):
                module.register_forward_hook(lambda layer, inputs, output: release(layer))


def release(layer: Any) -> None:
    """What the dispatcher of `layer`, whose forward is over, holds of a microbatch (`release_dispatched`)."""
    dispatcher = layer.token_dispatcher
    for holder in (dispatcher, getattr(dispatcher, "_comm_manager", None)):
        for name, value in vars(holder).items() if holder is not None else ():
            if isinstance(value, torch.Tensor) and name not in _MADE_ONCE:
                setattr(holder, name, None)
