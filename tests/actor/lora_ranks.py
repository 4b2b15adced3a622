"""What a rank does to train adapters, and all that can be compared afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.actor.matrix import Case, Lesson, build_actor, exported, gradients_as_weights
from tests.peft_adapters import lora_of

TOKENS = [list(range(5, 17)), list(range(40, 52))]


@dataclass(frozen=True)
class TrainedAdapters:
    """On rank 0 (logits: the last pipeline stage's vocabulary shard, None elsewhere
    and under context parallelism), everything by PEFT's names."""

    logits: np.ndarray | None
    metrics: list[dict[str, float]]
    gradients: list[dict[str, np.ndarray]]
    adapters: list[dict[str, np.ndarray]]
    """Before the first update, and after the last."""
    merged: dict[str, np.ndarray]
    """Every weight of the model after the last update, by its Hugging Face name."""
    base_changed: list[str]
    trained: int
    """Numbers with an optimizer state on this rank."""


def train_adapters(
    rank: int, path: str, layout: dict, lesson: Lesson, case: Case, adapter: Path, saved: Path
) -> TrainedAdapters:
    from megatron_dppo.actor.actor import TrainingSignal
    from megatron_dppo.batch import InMemorySource
    from megatron_dppo.checkpoint.peft_adapter import adapter_exporter, save_peft_adapter
    from megatron_dppo.checkpoint.state_parts import distributed_parts
    from megatron_dppo.models.hf_config import load_hf_config
    from megatron_dppo.models.lora.config import LoraConfig
    from megatron_dppo.models.packed_logits import packed_logits

    lora = lora_of(load_hf_config(path).family.model_type)
    config = LoraConfig(**lora)
    actor = build_actor(path, layout, case, lora=lora | {"adapter": adapter})
    model, groups = actor.trainee.model, actor.runtime.groups
    exporter = adapter_exporter(actor.model, model, groups, config)

    def adapters() -> dict[str, np.ndarray]:
        return {name: t.numpy().copy() for name, t in exporter.stream() if t is not None}

    gradients: list[dict[str, np.ndarray]] = []
    prepare = actor.optimizer.prepare_grads

    def recording() -> Any:
        with gradients_as_weights(actor.chunks):
            gradients.append(adapters())
        return prepare()

    actor.optimizer.prepare_grads = recording
    frozen = {n: p.clone() for chunk in actor.model for n, p in chunk.named_parameters() if not p.requires_grad}
    outputs = []
    if actor.runtime.groups.cp.size() == 1:  # the helper does not divide sequences
        outputs = packed_logits(actor.model, [(torch.tensor(tokens), [len(tokens)]) for tokens in TOKENS])
    before = adapters()
    metrics = []
    for mini_batches in lesson.updates:
        signal = TrainingSignal(lesson.advantages, lesson.advantages, mini_batches)
        metrics.append(actor.update(InMemorySource.of(lesson.batch), signal).metrics)
    save_peft_adapter(saved, actor.model, model, groups, config)
    masters = [
        p for part in distributed_parts(actor.optimizer) for g in part.optimizer.param_groups for p in g["params"]
    ]
    after = adapters()
    left = {n: p for chunk in actor.model for n, p in chunk.named_parameters() if not p.requires_grad}
    return TrainedAdapters(
        torch.cat(outputs).numpy() if outputs else None,
        metrics,
        gradients if rank == 0 else [],
        [before, after] if rank == 0 else [],
        exported(actor),
        [name for name, p in left.items() if not torch.equal(p, frozen[name]) or p.grad is not None],
        sum(p.numel() for p in masters),
    )
