"""Where TransformerEngine's layers put weight gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch


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
