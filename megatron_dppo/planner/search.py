"""All sensible layouts of a model on a number of GPUs, the fastest that fits, and why others do not."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

from megatron_dppo.errors import UserError
from megatron_dppo.models.hf_config import HFConfig
from megatron_dppo.models.lora.config import LoraConfig
from megatron_dppo.models.parallel import ParallelConfig, Recompute
from megatron_dppo.planner.engine import EngineSettings
from megatron_dppo.planner.gpus import Gpu
from megatron_dppo.planner.parameters import stage_layers
from megatron_dppo.planner.plan import Plan, Run, largest_utilization
from megatron_dppo.planner.workload import EXPERT_IMBALANCE, Layout, Workload

SIZES = (1, 2, 4, 8)
"""Tensor- and context-parallel sizes: powers of two within a node."""


@dataclass(frozen=True)
class Wanted:
    """What the user has decided; None leaves it to the search."""

    tensor: int | None = None
    pipeline: int | None = None
    context: int | None = None
    expert: int | None = None
    recompute: Recompute | None = None
    microbatch_tokens: int | None = None
    """Default: a sequence of full length, 16,384 at least."""
    engine_tensor: int | None = None
    rollout_gpus: int | None = None
    """Default: shared GPUs where that fits, else half of the GPUs."""
    expert_imbalance: float = EXPERT_IMBALANCE
    """Rows of the fullest expert-parallel rank over the mean, in the worst microbatch."""
    lora: LoraConfig | None = None
    """Adapters to train in place of the weights."""


@dataclass(frozen=True)
class SearchResult:
    """Plans of every layout with the first recomputation that fits with a margin (`Plan.comfortable`), else at all; the
    best first, those without a margin last."""

    fitting: tuple[Plan, ...]
    others: tuple[Plan, ...]
    """Layouts that do not fit even with full recomputation; the nearest to fitting first."""
    impossible: tuple[tuple[ParallelConfig, str], ...]
    """Layouts that the model or the number of GPUs rules out."""

    @property
    def best(self) -> Plan | None:
        return self.fitting[0] if self.fitting else None


def search(model: HFConfig, gpu: Gpu, gpus: int, workload: Workload, wanted: Wanted) -> SearchResult:
    """Raises UserError for impossible numbers."""
    if wanted.rollout_gpus is not None and wanted.rollout_gpus >= gpus:
        raise UserError(f"--rollout-gpus {wanted.rollout_gpus}: must be from 0 to {gpus - 1} (of --gpus {gpus})")
    size, own = wanted.engine_tensor or 1, wanted.rollout_gpus or gpus
    if own % size or model.heads % size or (not wanted.rollout_gpus and size > gpu.gpus_per_node):
        raise UserError(
            f"--engine-tp {size}: must divide the {own} GPUs of the engines and the model's {model.heads} heads, "
            f"and be at most {gpu.gpus_per_node} (a node) where they share the trainer's GPUs"
        )
    if wanted.rollout_gpus is not None:
        return _search(model, gpu, gpus, workload, wanted, wanted.rollout_gpus)
    shared = _search(model, gpu, gpus, workload, wanted, 0)
    if shared.fitting or gpus == 1 or gpus // 2 % size:
        return shared
    apart = _search(model, gpu, gpus, workload, wanted, gpus // 2)
    return apart if apart.fitting else shared


def _search(
    model: HFConfig, gpu: Gpu, gpus: int, workload: Workload, wanted: Wanted, rollout_gpus: int
) -> SearchResult:
    fitting: list[Plan] = []
    others: list[Plan] = []
    impossible: list[tuple[ParallelConfig, str]] = []
    for parallel in layouts(model, gpus - rollout_gpus, wanted):
        try:
            plan = _leanest_needed(model, gpu, gpus - rollout_gpus, parallel, workload, wanted, rollout_gpus)
        except UserError as error:
            impossible.append((parallel, str(error)))
            continue
        (others if plan.problem else fitting).append(plan)
    fitting.sort(key=_order)
    others.sort(key=lambda plan: plan.on_gpu)
    return SearchResult(tuple(fitting), tuple(others), tuple(impossible))


def _order(plan: Plan) -> tuple[bool, float, int]:
    """Those with a margin first, of these the fastest; what is equal within 3 % goes by fewer ranks per copy of the
    model."""
    return not plan.comfortable, round(math.log(plan.step_s) / math.log(1.03)), plan.layout.parallel.model_ranks


def _leanest_needed(
    model: HFConfig,
    gpu: Gpu,
    gpus: int,
    parallel: ParallelConfig,
    workload: Workload,
    wanted: Wanted,
    rollout_gpus: int,
) -> Plan:
    """The plan with the first recomputation that fits with a margin, else the first that fits, else the last. Where
    whole layers have to be recomputed, as few as fit with that margin, unless the user asked for them."""

    def planned(recompute: Recompute, layers: int | None = None) -> Plan:
        layout = Layout(
            model=model,
            gpu=gpu,
            gpus=gpus,
            parallel=parallel,
            recompute=recompute,
            recompute_layers=layers,
            microbatch_tokens=wanted.microbatch_tokens or max(16384, parallel.packed_length(workload.sequence)),
            attention_span=workload.mean_sequence,
            expert_imbalance=wanted.expert_imbalance,
            lora=wanted.lora,
        )
        share = largest_utilization(gpu, shared=not rollout_gpus)
        settings = EngineSettings(tensor=wanted.engine_tensor, utilization=share)
        return Run(layout, workload, settings, rollout_gpus).plan()

    barely: Plan | None = None
    kinds = tuple(kind for kind in get_args(Recompute) if model.moe or kind != "activation")
    if wanted.recompute:
        kinds = (wanted.recompute,)
    for recompute in kinds:
        plan = planned(recompute)
        if plan.comfortable and recompute == "full" and not wanted.recompute:
            most = max(len(chunk) for stage in stage_layers(model.layers, parallel) for chunk in stage.chunks)
            fewest = bisect_left(range(1, most), True, key=lambda layers: planned("full", layers).comfortable) + 1
            return planned("full", fewest) if fewest < most else plan
        if plan.comfortable:
            return plan
        if not plan.problem:
            barely = barely or plan
    return barely or plan


def layouts(model: HFConfig, gpus: int, wanted: Wanted) -> Iterator[ParallelConfig]:
    """Candidates: what is not decided runs over powers of two (tensor, context) and divisors (pipeline, expert)."""
    tensors = [wanted.tensor] if wanted.tensor else [n for n in SIZES if gpus % n == 0 and model.heads % n == 0]
    pipelines = (
        [wanted.pipeline] if wanted.pipeline else [n for n in _divisors(gpus) if n <= model.layers // 2 or n == 1]
    )
    contexts = [wanted.context] if wanted.context else [n for n in SIZES if gpus % n == 0]
    if wanted.expert:
        experts = [wanted.expert]
    else:
        experts = [n for n in _divisors(model.moe.experts) if gpus % n == 0] if model.moe else [1]
    for tensor in tensors:
        for pipeline in pipelines:
            for context in contexts:
                for expert in experts:
                    yield ParallelConfig(
                        tensor=tensor,
                        pipeline=pipeline,
                        context=context,
                        expert=expert,
                        sequence_parallel=tensor > 1,
                    )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
