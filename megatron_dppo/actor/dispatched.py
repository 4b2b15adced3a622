"""What Megatron-Core's token dispatchers keep of the microbatch that they saw last."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

_MADE_ONCE = frozenset({"sort_input_by_local_experts", "restore_output_by_local_experts", "over_budget"})
"""Tensors of a dispatcher that are no part of a microbatch."""


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
                module.register_forward_hook(_release)


def _release(layer: Any, inputs: Any, output: Any) -> None:
    dispatcher = layer.token_dispatcher
    for holder in (dispatcher, getattr(dispatcher, "_comm_manager", None)):
        for name, value in vars(holder).items() if holder is not None else ():
            if isinstance(value, torch.Tensor) and name not in _MADE_ONCE:
                setattr(holder, name, None)
