"""What ranks do with adapters in `test_lora.py`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_dppo.checkpoint.hf_export import ShardExporter, weight_exporter
from megatron_dppo.checkpoint.peft_adapter import adapter_exporter, load_peft_adapter, save_peft_adapter
from megatron_dppo.models.lora.attach import attach_adapters
from megatron_dppo.models.lora.config import LoraConfig
from megatron_dppo.models.packed_logits import packed_logits
from tests.megatron import build_from
from tests.peft_adapters import LORA

CONFIG = LoraConfig(**LORA)
PACKS = [(torch.arange(3, 27), [11, 13])]


def named(exporter: Any) -> dict[str, np.ndarray]:
    return {name: tensor.float().numpy().copy() for name, tensor in exporter.stream() if tensor is not None}


def in_buckets(exporter: ShardExporter, rank: int) -> dict[str, np.ndarray]:
    """The weights as they travel to engines on GPUs, taken out of their buckets on rank 0."""
    buckets, found = exporter.buckets(40_000), {}
    payload = torch.empty(buckets.largest, dtype=torch.uint8)
    for index, layout in enumerate(buckets.layouts):
        buckets.gather(index, payload)
        for slot in layout.slots if rank == 0 else ():
            flat = payload[slot.offset : slot.offset + slot.nbytes].view(getattr(torch, slot.dtype)).float()
            for name, one in zip(slot.names(), flat.chunk(slot.count), strict=True):
                whole = torch.empty(slot.shape)
                blocks = slot.blocks or (tuple((0, size) for size in slot.shape),)
                parts = one.split([math.prod(b - a for a, b in block) for block in blocks])
                for block, part in zip(blocks, parts, strict=True):
                    target = whole[tuple(slice(*span) for span in block)]
                    target.copy_(part.view(target.shape))
                found[name] = whole.numpy()
    return found


def attach_and_look(rank: int, path: Path, layout: dict, folder: Path, saved: Path) -> dict[str, Any]:
    """Step 0, the first A, 100 exports of random adapters, and the folder that is written of them."""
    models, model, groups = build_from(path, layout, params_dtype=torch.bfloat16)
    before = packed_logits(models, PACKS)
    weights = named(weight_exporter(models, model, groups))
    attach_adapters(models, model, groups, CONFIG, seed=7)
    after = packed_logits(models, PACKS)
    found: dict[str, Any] = {
        "step_0": all(torch.equal(a, b) for a, b in zip(before, after, strict=True)),
        "trained": {n for chunk in models for n, p in chunk.named_parameters() if p.requires_grad},
        "first": named(adapter_exporter(models, model, groups, CONFIG)),
    }
    exporter = weight_exporter(models, model, groups)
    merged = named(exporter)
    found["merged_at_0"] = merged.keys() == weights.keys() and all((merged[n] == w).all() for n, w in weights.items())
    load_peft_adapter(models, model, CONFIG, folder)
    once = named(exporter)
    found["once"] = once
    found["changed"] = sum(bool((once[n] != w).any()) for n, w in weights.items())
    found["in buckets"] = in_buckets(exporter, rank)
    for _ in range(99):
        for _tensor in exporter.stream():
            pass
    hundredth = named(exporter)
    found["hundred"] = hundredth.keys() == once.keys() and all((hundredth[n] == w).all() for n, w in once.items())
    save_peft_adapter(saved, models, model, groups, CONFIG)
    return found


def first_adapters(rank: int, path: Path, layout: dict) -> dict[str, np.ndarray]:
    models, model, groups = build_from(path, layout)
    attach_adapters(models, model, groups, CONFIG, seed=7)
    return named(adapter_exporter(models, model, groups, CONFIG))


def logits_and_folder(rank: int, path: Path, layout: dict, folder: Path, saved: Path) -> np.ndarray:
    models, model, groups = build_from(path, layout)
    attach_adapters(models, model, groups, CONFIG)
    load_peft_adapter(models, model, CONFIG, folder)
    save_peft_adapter(saved, models, model, groups, CONFIG)
    return packed_logits(models, PACKS)[0].numpy()
