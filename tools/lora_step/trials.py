"""A model on this process's device, and how long its steps take."""

from __future__ import annotations

import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from actor_step.cases import SMALL, TOPK, Case, Sizes
from actor_step.problem import advantages, build, describe, timing_batch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from megatron_dppo.actor import runtime as actor_runtime
from megatron_dppo.actor.actor import MegatronActor, TrainingSignal
from megatron_dppo.actor.config import ActorConfig, OptimizerConfig
from megatron_dppo.actor.runtime import Runtime
from megatron_dppo.algorithm import presets
from megatron_dppo.batch import InMemorySource, RolloutBatch
from megatron_dppo.models.hf_config import HFConfig
from megatron_dppo.models.lora.attach import attach_adapters
from megatron_dppo.models.lora.config import LoraConfig
from megatron_dppo.models.parallel import ParallelConfig


class Trial:
    """A model on this process's device, built anew as often as asked."""

    def __init__(self, layers: int, recompute: Any, recompute_layers: int | None = None, *, tiny: bool) -> None:
        self.runtime: Runtime = actor_runtime.start(ParallelConfig(), seed=0, timeout_minutes=3)
        self.case = Case("trial", 1, layers, recompute=recompute, recompute_layers=recompute_layers)
        self.model: HFConfig = describe(self.case, tiny=tiny)
        self.sizes: Sizes = SMALL if tiny else self.case.sizes
        self.dtype = torch.float32 if tiny else torch.bfloat16

    def close(self) -> None:
        """End what the device and the process group hold."""
        actor_runtime.stop()

    def chunks(self, lora: LoraConfig | None) -> list[Any]:
        """Weights that are the same each time, with adapters or without."""
        built = build(self.case, self.model, self.runtime, self.dtype)
        if lora:
            attach_adapters(built, self.model, self.runtime.groups, lora)
        return built

    def actor(self, chunks: Sequence[Any], lora: LoraConfig | None, preset: str) -> MegatronActor:
        return MegatronActor(
            self.runtime,
            chunks,
            parallel=ParallelConfig(),
            config=ActorConfig(
                dtype=str(self.dtype).removeprefix("torch."),
                max_tokens_per_microbatch=self.sizes.pack,
                recompute=self.case.recompute,
                recompute_layers=self.case.recompute_layers,
            ),
            optimizer=OptimizerConfig(lr=1e-5 if lora else 1e-6),
            preset=presets.get(preset, **({"topk": TOPK} if "topk" in preset else {})),
            hf_config=self.model,
            temperature=1.0,
            normaliser=float(self.sizes.length),
            lora=lora,
        )


def signal_of(batch: RolloutBatch) -> TrainingSignal:
    """One gradient step on all of a batch."""
    weights = advantages(len(batch))
    return TrainingSignal(weights, weights, [np.arange(len(batch))])


def timing(trial: Trial, lora: LoraConfig | None, steps: int) -> dict[str, Any]:
    """Seconds of each step after one that is not counted, of an export of all weights, and memory."""
    chunks = trial.chunks(lora)
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    total, trained = (sum(p.numel() for p in some) for some in (parameters, [p for p in parameters if p.requires_grad]))
    actor = trial.actor(chunks, lora, "dppo-topk-tv")
    gc.collect()
    gc.freeze()  # as `train` does
    batch = timing_batch(trial.case, trial.model, trial.sizes)
    source, signal = InMemorySource.of(batch), signal_of(batch)
    actor.update(source, signal)
    held = _gib("memory_allocated")
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    seconds = [_seconds(lambda: actor.update(source, signal)) for _ in range(steps)]
    peak = _gib("max_memory_allocated")
    kernels = kernel_seconds(lambda: actor.update(source, signal)) if torch.cuda.is_available() else {}
    export = min(_seconds(lambda: sum(1 for _ in actor.export_weights())) for _ in range(2))
    step = statistics.median(seconds)
    return {
        "parameters": total,
        "trained": trained,
        "tokens": len(batch.token_ids),
        "seconds": seconds,
        "held_gib": held,
        "peak_gib": peak,
        "export_s": export,
        "kernels_s": kernels,
        "summary": f"{step:.3f} s, peak {peak:.1f} GiB, {trained / 1e6:.0f}M trained, export {export:.2f} s",
    }


def kernel_seconds(work: Callable[[], Any]) -> dict[str, float]:
    """Seconds of the device's work by kernel name, the longest first, of one call of `work`: a bound of what it can
    take. Operators are not recorded, so that the host keeps its pace."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    taken: Counter[str] = Counter()
    for event in profiler.events() or ():
        if event.device_type != DeviceType.CPU and not event.is_user_annotation:
            taken[event.name] += (event.time_range.end - event.time_range.start) / 1e6
    return dict(taken.most_common())


def _seconds(work: Any) -> float:
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _gib(what: str) -> float:
    return getattr(torch.cuda, what)() / 2**30 if torch.cuda.is_available() else 0.0
