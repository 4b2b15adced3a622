"""Peak memory of importing and exporting a checkpoint."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import psutil
import torch

from megatron_dppo.checkpoint.hf_export import ExportedTensor
from megatron_dppo.checkpoint.hf_import import fill_parameters, load_hf_weights
from megatron_dppo.checkpoint.hf_save import save_hf_checkpoint
from megatron_dppo.checkpoint.megatron_files import RELEASE, MegatronFiles
from megatron_dppo.checkpoint.megatron_save import save_megatron_checkpoint
from megatron_dppo.checkpoint.safetensors_stream import SafetensorsStream
from megatron_dppo.compat import megatron_cpu
from megatron_dppo.models.hf_config import load_hf_config
from tests.megatron import build_from
from tests.tiny import tiny_qwen3_moe


class Peak:
    """Most resident memory of this process beyond what it had at the start, mapped files included, in bytes."""

    def __enter__(self) -> Peak:
        self._process, self._stop = psutil.Process(), threading.Event()
        self._start = self.highest = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.highest = max(self.highest, self._process.memory_info().rss)

    def __exit__(self, *unused: object) -> None:
        self._stop.set()
        self._thread.join()
        self.extra = max(self.highest, self._process.memory_info().rss) - self._start


def write_large_model(path: Path, gigabytes: float) -> int:
    """A bf16 Qwen3-MoE folder of about that size, written tensor by tensor; its bytes."""
    tiny_qwen3_moe(
        path,
        hidden_size=1024,
        head_dim=64,
        num_attention_heads=16,
        num_key_value_heads=4,
        num_hidden_layers=1,
        moe_intermediate_size=512,
        num_experts=16,
        vocab_size=32000,
    )
    for file in path.glob("*.safetensors*"):
        file.unlink()
    raw = json.loads((path / "config.json").read_text())
    per_layer = (16 * 3 * 512 + 3 * 1024) * 1024 * 2
    raw |= {"num_hidden_layers": int(gigabytes * 2**30 / per_layer), "dtype": "bfloat16"}
    (path / "config.json").write_text(json.dumps(raw))
    tensors = [ExportedTensor(n, s, torch.bfloat16) for n, s in load_hf_config(path).tensors.items()]
    half = len(tensors) // 2
    placed = {}
    for number, part in enumerate((tensors[:half], tensors[half:]), start=1):
        name = f"model-{number:05d}-of-00002.safetensors"
        with SafetensorsStream(path / name, part) as stream:
            for tensor in part:
                stream.write(tensor.name, torch.rand(tensor.shape).to(torch.bfloat16))
                placed[tensor.name] = name
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return sum(t.nbytes for t in tensors)


def megatron_lm(rank: int, path: Path, target: Path, layout: dict[str, Any]) -> tuple[int, int, int]:
    """Bytes of this rank's shard, and the extra peaks of writing a folder of Megatron-LM's and of reading it again."""
    models, model, groups = build_from(path, layout, params_dtype=torch.bfloat16)
    shard = sum(p.numel() * p.element_size() for gpt in models for p in gpt.parameters())
    with Peak() as writing:
        save_megatron_checkpoint(target, models, model, groups)
    with Peak() as reading:
        fill_parameters(models, model, groups, MegatronFiles(target / RELEASE, model))
    return shard, writing.extra, reading.extra


def import_and_export(rank: int, path: Path, target: Path, layout: dict[str, Any]) -> tuple[int, int, int]:
    """Bytes of this rank's shard, and the extra peaks of import (from before the model is built) and export."""
    megatron_cpu.install()
    with Peak() as importing:
        models, model, groups = build_from(path, layout, load=False, params_dtype=torch.bfloat16)
        load_hf_weights(models, model, groups)
    shard = sum(p.numel() * p.element_size() for gpt in models for p in gpt.parameters())
    with Peak() as exporting:
        save_hf_checkpoint(target, models, model, groups)
    return shard, importing.extra, exporting.extra
