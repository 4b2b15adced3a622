"""A rank that exports the weights of a model with adapters."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.peft_adapters import LORA


def export_merged(rank: int, model: Path, layout: dict, adapter: Path, file: Path) -> None:
    """What the actor streams to the engine, to `file`."""
    from megatron_dppo.checkpoint.hf_export import weight_exporter
    from megatron_dppo.checkpoint.peft_adapter import load_peft_adapter
    from megatron_dppo.models.lora.attach import attach_adapters
    from megatron_dppo.models.lora.config import LoraConfig
    from tests.megatron import build_from

    models, hf_config, groups = build_from(model, layout, params_dtype=torch.float32)
    attach_adapters(models, hf_config, groups, LoraConfig(**LORA))
    load_peft_adapter(models, hf_config, LoraConfig(**LORA), adapter)
    stream = weight_exporter(models, hf_config, groups).stream()
    streamed = {name: tensor for name, tensor in stream if tensor is not None}
    if rank == 0:
        save_file(streamed, file)
