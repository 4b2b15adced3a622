"""A layout assessed: does it fit, how long does a step take, how far is that from what was measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

from megatron_dppo.models.hf_config import HFConfig
from megatron_dppo.planner.adapters import merged_tensors
from megatron_dppo.planner.engine import UTILIZATION, WORKSPACE, EnginePlan, EngineSettings, plan_engine
from megatron_dppo.planner.gpus import GIB, MEASURED, Gpu, efficiency_of
from megatron_dppo.planner.memory import OUTSIDE_ALLOCATOR, StageMemory, stage_memory
from megatron_dppo.planner.parameters import exported, whole_model
from megatron_dppo.planner.step_time import StepTime, step_time
from megatron_dppo.planner.sync import SyncMemory, expert_share, sync_memory
from megatron_dppo.planner.workload import Layout, Workload


@dataclass(frozen=True)
class Traffic:
    """Bytes per rollout step."""

    weight_sync: int
    """bf16 weights, once per engine."""
    routes: int
    """Chosen experts of every token and MoE layer, in the narrowest unsigned type."""
    log_probs: int
    """Ids (int32) and log-probabilities (float32) of the top K and of the sampled token, of every response token."""
    tokens: int
    """Token ids and masks."""

    @property
    def rollouts(self) -> int:
        """What the object store holds of one step."""
        return self.routes + self.log_probs + self.tokens


def step_traffic(model: HFConfig, workload: Workload, engines: int) -> Traffic:
    routes = 0
    if model.moe is not None and workload.routes:
        width = 1 if model.moe.experts <= 256 else 2
        routes = workload.tokens * sum(model.moe.layers) * model.moe.topk * width
    response = workload.sequences * workload.mean_response_tokens
    return Traffic(
        weight_sync=2 * exported(model) * engines,
        routes=routes,
        log_probs=8 * response * (workload.topk + 1),
        tokens=9 * workload.tokens,
    )


MEASURED_GPUS, MEASURED_TOKENS = 4, 16384
"""The largest run and the most tokens per rank that predictions were held against (docs/planner.md)."""
MEASURED_LORA = (1, "h200-141g")
"""GPUs and their kind that predictions with adapters were held against."""
SLEEPING_ENGINE = 2 * GIB
"""What an engine on the same GPU keeps while it sleeps: context, communicators, graphs."""
LENT = int(2.5 * GIB)
"""What torch's allocator keeps of a trainer whose GPU is lent to an engine, beside what it does not see; weights,
gradients and optimizer state are on the host then. From 75.6 GiB on a GPU of which an engine had 69.9
(docs/planner.md): 0.2 of it were allocated, the rest are blocks that are not wholly free."""
ENGINE_OUTSIDE = int(0.7 * GIB)
"""Of an engine beyond its share of the GPU: 112.5 GiB were measured for 111.8 (docs/benchmarks.md)."""
OF_ENGINES = ("generation", "generation (engines' GPUs)", "weight sync (engines' GPUs)")
"""Moments in which engines have what they were given of a GPU."""
COMFORTABLE = 0.92
"""Share of a GPU above which the planner's error, an uneven pack or another process can be too much."""
SYNC_EFFICIENCY = 0.5
"""Of the slowest wire in a weight sync."""


@dataclass(frozen=True)
class Run:
    """What is planned."""

    layout: Layout
    """Of the training GPUs."""
    workload: Workload
    settings: EngineSettings = field(default_factory=EngineSettings)
    """What was decided of the engines."""
    rollout_gpus: int = 0
    """GPUs that only generate; 0: engines share the GPUs of the trainer, and sleep while it trains if
    `settings.sleeps`."""

    def plan(self) -> Plan:
        """Raises UserError where the layout is impossible whatever the memory (`ParallelConfig.check_fits`)."""
        layout = self.layout
        layout.parallel.check_fits(layout.model, layout.gpus)
        microbatches = microbatches_per_rank(layout, self.workload)
        stages = range(layout.parallel.pipeline)
        engine = plan_engine(layout.model, layout.gpu, self.rollout_gpus or layout.gpus, self.workload, self.settings)
        return Plan(
            layout,
            self.workload,
            self.settings,
            self.rollout_gpus,
            stages=tuple(stage_memory(layout, stage, microbatches) for stage in stages),
            gradient_step=step_time(layout, microbatches),
            microbatches=microbatches,
            engine=engine,
            sync=sync_memory(layout, self.settings, engine.tensor, colocated=not self.rollout_gpus),
            traffic=step_traffic(layout.model, self.workload, engine.engines),
        )


@dataclass(frozen=True, kw_only=True)
class Plan(Run):
    """A run with its figures: does it fit, how long does a step take."""

    stages: tuple[StageMemory, ...]
    gradient_step: StepTime
    microbatches: int
    """Per data-parallel rank and gradient step."""
    engine: EnginePlan
    sync: SyncMemory
    traffic: Traffic

    @cached_property
    def problem(self) -> str:
        """Why this cannot run; empty where it can."""
        layout, workload = self.layout, self.workload
        longest = layout.parallel.packed_length(workload.sequence)
        if longest > layout.microbatch_tokens:
            return (
                f"a sequence of {longest} tokens is longer than a microbatch of {layout.microbatch_tokens}: "
                "raise --microbatch-tokens (actor.max_tokens_per_microbatch)"
            )
        if workload.sequences < layout.data * workload.mini_batches:
            return (
                f"{workload.sequences // workload.mini_batches} sequences of a gradient step are fewer than "
                f"{layout.data} data-parallel ranks: use more model parallelism or larger mini-batches"
            )
        return memory_problem(self)

    @property
    def extrapolated(self) -> tuple[str, ...]:
        """What lies beyond the measured range."""
        layout, gpus, beyond = self.layout, self.gpus, []
        if gpus > MEASURED_GPUS:
            beyond.append(f"{gpus} GPUs (measured: 1 to {MEASURED_GPUS})")
        if not layout.gpu.measured:
            beyond.append(f"{layout.gpu.name}, estimated by the H100's efficiencies (measured: {', '.join(MEASURED)})")
        if layout.tokens_per_rank > MEASURED_TOKENS:
            beyond.append(f"{layout.tokens_per_rank} tokens per rank (measured: {MEASURED_TOKENS})")
        if layout.lora is not None and (gpus, layout.gpu.name) != MEASURED_LORA:
            beyond.append(f"LoRA on {gpus} x {layout.gpu.name} (measured: {MEASURED_LORA[0]} x {MEASURED_LORA[1]})")
        if gpus > layout.gpu.gpus_per_node:
            beyond.append("traffic between nodes")
        return tuple(beyond)

    @property
    def fullest(self) -> StageMemory:
        return max(self.stages, key=lambda stage: stage.peak)

    @property
    def gpus(self) -> int:
        """All that the job needs."""
        return self.layout.gpus + self.rollout_gpus

    @property
    def on_gpu(self) -> int:
        """Bytes of the fullest GPU while training."""
        beside = SLEEPING_ENGINE if self.settings.sleeps else self.engine.on_gpu + ENGINE_OUTSIDE
        return max(stage.on_gpu for stage in self.stages) + (0 if self.rollout_gpus else beside)

    @property
    def moments(self) -> dict[str, int]:
        """Bytes of the fullest GPU, moment by moment of a step. GPUs that are shared change hands: the engine sleeps
        while the trainer trains, both have their weights there in a weight sync, then the trainer's go to the host.
        In the first sync engines need more. Without sleep both keep all they have."""
        generation = self.engine.on_gpu + ENGINE_OUTSIDE
        if self.rollout_gpus:  # what generation works in is free in a sync
            sync = generation + max(0, self.sync.first - WORKSPACE)
            return {"training": self.on_gpu, OF_ENGINES[1]: generation, OF_ENGINES[2]: sync}
        if not self.settings.sleeps:
            return {"training beside the engine": self.on_gpu}
        trainer = max(stage.weights + stage.adapter_weights for stage in self.stages)
        kept = OUTSIDE_ALLOCATOR + LENT + min(self.settings.kept, max(stage.optimizer for stage in self.stages))
        both = trainer + kept + self.engine.weights + SLEEPING_ENGINE
        return {
            "training": self.on_gpu,
            "first weight sync": both + self.sync.first,
            "weight sync": both + self.sync.usual,
            OF_ENGINES[0]: generation + kept,
        }

    @property
    def share(self) -> float:
        """Of the fullest GPU, while it trains or its weights are synced. Where engines have all they were given, and no
        more, that it fits is enough."""
        return max(size for moment, size in self.moments.items() if moment not in OF_ENGINES) / self.layout.gpu.memory

    @property
    def comfortable(self) -> bool:
        """Whether it fits with a margin."""
        return not self.problem and self.share <= COMFORTABLE

    @property
    def host_per_node(self) -> int:
        """Bytes of page-locked memory of a training node: optimizer state that lives there and, where engines share the
        GPUs, what goes there while they generate. Rollouts come beside (`traffic.rollouts`, on all hosts together)."""
        ranks = min(self.layout.gpus, self.layout.gpu.gpus_per_node)
        lent = 0
        if not self.rollout_gpus and self.settings.sleeps:
            lent = max(
                stage.weights + stage.adapter_weights + max(0, stage.optimizer - self.settings.kept)
                for stage in self.stages
            )
        return ranks * (lent + max(stage.host_optimizer for stage in self.stages))

    @property
    def train_s(self) -> float:
        """Seconds of all gradient steps of a rollout step, all passes over it."""
        return self.workload.gradient_steps * self.gradient_step.total

    @property
    def rollout_s(self) -> float:
        """Seconds of generation, at the fleet's rate; that the last sequences are decoded by few is not in it."""
        tokens = self.workload.sequences * self.workload.mean_response_tokens
        return tokens / self.engine.decode_tokens_per_second

    @property
    def sync_s(self) -> float:
        """Seconds of a weight sync; engines load side by side. Adapters are merged into the weights that are sent.
        Where the GPUs of an engine get shares of the experts, what a GPU takes or what a rank sends is the longer of
        the two; the network between nodes takes whole models."""
        layout, gpu, tensor = self.layout, self.layout.gpu, self.engine.tensor
        bytes_ = self.traffic.weight_sync / self.engine.engines
        share = expert_share(layout, self.settings, tensor, colocated=not self.rollout_gpus)
        # Colocated ranks bring all of a bucket together that any of them has a part of.
        apart = self.rollout_gpus > 0 or layout.parallel.expert == tensor
        if share < 1 and apart and self.gpus <= gpu.gpus_per_node:
            taken = bytes_ - 2 * whole_model(layout.model).experts * (1 - share)
            bytes_ = max(taken, *(stage.weights for stage in self.stages))
        wire = gpu.link_bandwidth if self.gpus <= gpu.gpus_per_node else gpu.network_bandwidth
        merged = max(merged_tensors(layout, stage) for stage in range(layout.parallel.pipeline))
        merge = merged * efficiency_of(gpu.name).merge_s
        return merge + bytes_ / (wire * SYNC_EFFICIENCY)

    @property
    def step_s(self) -> float:
        return self.train_s + self.rollout_s + self.sync_s

    @property
    def training_tokens_per_second(self) -> float:
        """While it trains; a token counts in every pass."""
        return self.workload.trained_tokens / self.train_s

    @property
    def tokens_per_second(self) -> float:
        """Of the whole rollout step; a token counts once."""
        return self.workload.tokens / self.step_s


def largest_utilization(gpu: Gpu, *, shared: bool) -> float:
    """The usual share of a GPU for engines, or what others leave of it, in whole percent."""
    taken = ENGINE_OUTSIDE + (OUTSIDE_ALLOCATOR + LENT if shared else 0)
    return min(UTILIZATION, math.floor(100 * (1 - taken / gpu.memory)) / 100)


def microbatches_per_rank(layout: Layout, workload: Workload) -> int:
    """Packs of a gradient step on one data-parallel rank; interleaved schedules take multiples of the stages."""
    per_rank = math.ceil(workload.tokens / workload.mini_batches / layout.data / layout.microbatch_tokens)
    multiple = layout.parallel.pipeline if layout.parallel.chunks > 1 else 1
    return max(1, math.ceil(per_rank / multiple)) * multiple


def memory_problem(plan: Plan) -> str:
    """What does not fit where and how large its parts are; empty where all does."""
    engine, memory = plan.engine, plan.layout.gpu.memory
    if plan.on_gpu > memory:
        fullest = max(plan.stages, key=lambda stage: stage.on_gpu)
        return (
            f"needs {plan.on_gpu / GIB:.0f} GiB of {memory / GIB:.0f} (stage {fullest.stage}: {largest_part(fullest)})"
        )
    beside = "" if plan.rollout_gpus else " beside the trainer"
    if not engine.fits:
        return (
            f"a vLLM engine of {engine.tensor} GPUs has no room{beside} for a sequence of {plan.workload.sequence} "
            f"tokens: {engine.weights / GIB:.0f} GiB of weights and {engine.kv_cache / GIB:.1f} GiB of KV cache a GPU, "
            f"where a sequence takes {engine.kv_per_token * plan.workload.sequence / GIB:.1f}"
        )
    for moment, size in plan.moments.items():
        if size > memory:
            return (
                f"needs {size / GIB:.0f} GiB of {memory / GIB:.0f} in {moment}: a vLLM engine of {engine.tensor} GPUs "
                f"has {engine.weights / GIB:.0f} GiB of weights and {engine.kv_cache / GIB:.0f} GiB of KV cache per "
                f"GPU{beside}"
            )
    return ""


def largest_part(stage: StageMemory) -> str:
    """The part of the memory to look at first, in words."""
    parts = {
        "weights": stage.weights + stage.adapter_weights,
        "gradients": stage.gradients,
        "optimizer state": stage.optimizer,
        "activations": stage.activations,
        "workspace": max(stage.workspace, stage.head_workspace),
    }
    name = max(parts, key=lambda part: parts[part])
    return f"mostly {name}, {parts[name] / GIB:.0f} GiB"
