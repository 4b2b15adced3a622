"""What a rank does in the layout matrix: train the same rollout under any layout, report all that can be compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_dppo.batch import RolloutBatch
from megatron_dppo.errors import UserError

SHAPE = {"groups": 4, "samples": 3, "topk": 5, "experts": 8, "k": 2}
LR, CLIP, NORMALISER, BUDGET = 2e-3, 1.0, 12.0, 64
TEMPERATURE = 0.25  # peaked distributions, so that divergences are large enough to be masked
EPSILON = 1e-3  # large, so that Adam does not blow the rounding of a vanishing gradient up to a full step
UPDATES = [[np.arange(0, 5), np.arange(5, 9)], [np.arange(9, 12)]]
"""Mini-batches of two calls of `update`: the second call recomputes its anchor from the trained weights."""

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank": (1, {}),
    "TP2": (2, {"tensor": 2, "sequence_parallel": True}),
    "PP2": (2, {"pipeline": 2}),
    "PP2 VPP2": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "CP2": (2, {"context": 2}),
    "DP2": (2, {}),
    "EP2": (2, {"expert": 2}),
    "TP2 EP2": (2, {"tensor": 2, "expert": 2, "sequence_parallel": True}),
    "TP2 ETP2": (2, {"tensor": 2, "expert_tensor": 2, "sequence_parallel": True}),
    "DP2 ETP2": (2, {"expert_tensor": 2}),
    "TP2 PP2 EP2": (4, {"tensor": 2, "pipeline": 2, "expert": 2, "sequence_parallel": True}),
    "TP2 CP2": (4, {"tensor": 2, "context": 2, "sequence_parallel": True}),
    "TP2 CP2 EP4": (4, {"tensor": 2, "context": 2, "expert": 4, "sequence_parallel": True}),
    "PP2 VPP2 EP2": (4, {"pipeline": 2, "virtual_pipeline": 2, "expert": 2}),
    "PP2 CP2": (4, {"pipeline": 2, "context": 2}),
    "TP2 EP2 ETP2": (4, {"tensor": 2, "expert": 2, "expert_tensor": 2, "sequence_parallel": True}),
}

FAMILIES = ["mixtral", "olmoe", "glm4_moe", "minimax_m2", "qwen3_next", "qwen3_5_moe", "deepseek_v3", "gpt_oss"]
"""Model types beside Qwen3-MoE that are trained in the layouts of these tests."""
KIN = ["glm4_moe_lite", "kimi_k2"]
"""And those that are DeepSeek-V3 with other sizes, in the full matrix alone."""

REFUSED = {"gpt_oss": ("context", "expert_tensor")}
"""Sizes above 1 that a family refuses by name."""


def runs(family: str, layout: str) -> bool:
    """Whether a family is trained in a layout."""
    return all(LAYOUTS[layout][1].get(size, 1) == 1 for size in REFUSED.get(family, ()))


def check_refusal(path: Path, layout: str) -> None:
    """One line says which size of the layout the model in `path` cannot have."""
    from megatron_dppo.models.hf_config import load_hf_config
    from megatron_dppo.models.parallel import ParallelConfig

    ranks, sizes = LAYOUTS[layout]
    with pytest.raises(UserError, match=r"^[^\n]*(context|expert_tensor) = \d ranks cannot share; set it to 1[^\n]*$"):
        ParallelConfig(**sizes).check_fits(load_hf_config(path), ranks)


OVERRIDES: dict[str, dict[str, Any]] = {
    "dppo-topk-kl": {"topk": SHAPE["topk"]},
    "gspo": {"threshold_negative": 0.05, "threshold_positive": 0.05},
    "geometric-mis": {"band_low": 0.5, "band_high": 3.0},
}


@dataclass(frozen=True)
class Case:
    """One cell of the matrix, but its layout."""

    preset: str = "dppo-binary-tv"
    replay: bool = True
    recompute: str = "none"
    dispatcher: str = "alltoall"
    budget: int = BUDGET
    long_sequences: str = "refuse"
    recompute_layers: int | None = None

    def __str__(self) -> str:
        routes = "recorded routes" if self.replay else "live routes"
        return f"{self.preset}, {routes}, recompute {self.recompute}, {self.dispatcher}"


@dataclass(frozen=True)
class Trained:
    """What came out: metrics of each update, gradients (before clipping) of each step and weights, by Hugging Face
    name, on rank 0."""

    metrics: list[dict[str, float]]
    gradients: list[dict[str, np.ndarray]]
    weights: dict[str, np.ndarray]


def advantages() -> np.ndarray:
    return np.random.default_rng(1).choice([-1.0, -0.5, 0.0, 0.7, 1.0], size=SHAPE["groups"] * SHAPE["samples"])


@dataclass(frozen=True)
class Lesson:
    """A rollout, what its sequences are worth, and how they are divided into gradient steps."""

    batch: RolloutBatch
    advantages: np.ndarray
    updates: list[list[np.ndarray]]

    def reordered(self, order: np.ndarray) -> Lesson:
        """The same sequences in another order."""
        new_number = np.argsort(order)
        updates = [[new_number[mini_batch] for mini_batch in update] for update in self.updates]
        return Lesson(self.batch.select(order), self.advantages[order], updates)


def train_cases(rank: int, path: str, layout: dict, lesson: Lesson, cases: list[Case]) -> list[Trained]:
    """Every case in turn on the same ranks; Megatron-Core's groups are made anew for each."""
    from megatron.core import parallel_state

    results = []
    for case in cases:
        results.append(train(rank, path, layout, lesson, case))
        parallel_state.destroy_model_parallel()
    return results


def train_layouts(rank: int, path: str, lesson: Lesson, jobs: list[tuple[dict, list[Case]]]) -> list[list[Trained]]:
    """Layouts and their cases in turn on the same ranks."""
    return [train_cases(rank, path, layout, lesson, cases) for layout, cases in jobs]


def build_actor(
    path: str,
    layout: dict,
    case: Case,
    *,
    dtype: str = "float32",
    aux: tuple[float, float] = (0, 0),
    mode: str | None = None,
    temperature: float = TEMPERATURE,
    lora: dict[str, Any] | None = None,
    reference_kl: Any = None,
    router_bias_update_rate: float = 0.0,
    megatron: dict[str, Any] | None = None,
    **optimizer: Any,
):
    """A `MegatronActor` with the weights of `path` on this rank. `mode`: whose routes, where the case does not say;
    `lora`: fields of LoraConfig, for adapters in place of the weights."""
    from megatron_dppo.actor.actor import MegatronActor
    from megatron_dppo.actor.config import ActorConfig, OptimizerConfig
    from megatron_dppo.actor.runtime import start
    from megatron_dppo.algorithm import presets
    from megatron_dppo.checkpoint.hf_import import load_hf_weights
    from megatron_dppo.checkpoint.peft_adapter import load_peft_adapter
    from megatron_dppo.models.build import build_model
    from megatron_dppo.models.hf_config import load_hf_config
    from megatron_dppo.models.lora.attach import attach_adapters
    from megatron_dppo.models.lora.config import LoraConfig
    from megatron_dppo.models.megatron_config import transformer_config
    from megatron_dppo.models.parallel import ParallelConfig

    parallel = ParallelConfig(**layout)
    runtime = start(parallel, seed=0, timeout_minutes=5)
    model = load_hf_config(path)
    parallel.check_fits(model, runtime.world_size)
    config = ActorConfig(
        dtype=dtype,
        max_tokens_per_microbatch=case.budget,
        long_sequences=case.long_sequences,
        router_replay=mode or ("r3" if case.replay else "none"),
        recompute=case.recompute,
        recompute_layers=case.recompute_layers,
        token_dispatcher=case.dispatcher,
        load_balancing_loss=aux[0],
        router_z_loss=aux[1],
        router_bias_update_rate=router_bias_update_rate,
        megatron=megatron or {},
    )
    settings = transformer_config(
        model,
        parallel,
        params_dtype=getattr(torch, dtype),
        recompute=config.recompute,
        recompute_layers=config.recompute_layers,
        token_dispatcher=config.token_dispatcher,
        load_balancing_loss=config.load_balancing_loss,
        router_z_loss=config.router_z_loss,
        router_bias_update_rate=config.router_bias_update_rate,
        **config.megatron_options().transformer,
    )
    chunks = build_model(model, settings, runtime.groups)
    load_hf_weights(chunks, model, runtime.groups, path)
    adapters = LoraConfig(**lora) if lora else None
    if adapters:
        attach_adapters(chunks, model, runtime.groups, adapters)
        if adapters.adapter:
            load_peft_adapter(chunks, model, adapters, adapters.adapter)
    return MegatronActor(
        runtime,
        chunks,
        parallel=parallel,
        config=config,
        optimizer=OptimizerConfig(**({"lr": LR, "clip_grad": CLIP, "epsilon": EPSILON} | optimizer)),
        preset=presets.get(case.preset, **OVERRIDES.get(case.preset, {})),
        hf_config=model,
        temperature=temperature,
        normaliser=NORMALISER,
        lora=adapters,
        reference_kl=reference_kl,
    )


def train(rank: int, path: str, layout: dict, lesson: Lesson, case: Case) -> Trained:
    return train_actor(rank, build_actor(path, layout, case), lesson)


def train_actor(rank: int, actor: Any, lesson: Lesson) -> Trained:
    from megatron_dppo.actor.actor import TrainingSignal
    from megatron_dppo.batch import InMemorySource

    gradients: list[dict[str, np.ndarray]] = []
    prepare = actor.optimizer.prepare_grads

    def recording() -> Any:
        with gradients_as_weights(actor.chunks):
            gradients.append(exported(actor))
        return prepare()

    actor.optimizer.prepare_grads = recording
    metrics = []
    for mini_batches in lesson.updates:
        source = InMemorySource.of(lesson.batch)
        metrics.append(actor.update(source, TrainingSignal(lesson.advantages, lesson.advantages, mini_batches)).metrics)
    weights = exported(actor)
    return Trained(metrics, gradients if rank == 0 else [], weights if rank == 0 else {})


def exported(actor: Any) -> dict[str, np.ndarray]:
    tensors = ((name, tensor) for name, tensor in actor.export_weights() if tensor is not None)
    return {name: (tensor.float() if tensor.dtype.itemsize < 4 else tensor).numpy().copy() for name, tensor in tensors}


@contextmanager
def gradients_as_weights(chunks: Any) -> Iterator[None]:
    """Inside, every trained parameter holds its reduced gradient, so that exporters name gradients as they do weights.

    The distributed optimizer leaves each data-parallel rank its shard of the sum; the shards are gathered first.
    """
    kept = []
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                shards = list(bucket.grad_data.view(group.size(), -1))
                own = shards[group.rank()].clone()
                dist.all_gather(shards, own, group=group)
        for parameter in chunk.module.parameters():
            if parameter.requires_grad:
                kept.append((parameter, parameter.data))
                parameter.data = parameter.main_grad.detach().to(parameter.dtype)
    yield
    for parameter, weights in kept:
        parameter.data = weights
