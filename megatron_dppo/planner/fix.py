"""The cheapest change of a run that does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from megatron_dppo.actor.pack_shape import Split
from megatron_dppo.errors import UserError
from megatron_dppo.models.parallel import Recompute
from megatron_dppo.planner.engine import ENGINE_SIZES
from megatron_dppo.planner.plan import Plan, Run, largest_utilization
from megatron_dppo.planner.search import SIZES

MOST_CHANGES = 3
MORE_GPUS = (2, 4, 8)
"""Times as many training ranks, tried in this order."""


@dataclass(frozen=True)
class Fix:
    """A run that fits."""

    keys: tuple[str, ...]
    """`a.b=c` overrides that lead there; empty where more GPUs are enough."""
    plan: Plan
    more_gpus: bool = False
    """Whether it takes more GPUs than there are."""

    def __str__(self) -> str:
        keys = f"set {' '.join(self.keys)}" if self.keys else ""
        gpus = f"use {self.plan.gpus} GPUs" if self.more_gpus else ""
        return " and ".join(part for part in (gpus, keys) if part)


type _Change = tuple[tuple[str, ...], Run]
type _Kind = Callable[[Run], Iterator[_Change]]
"""All ways to change one setting of a run."""


def find_fix(run: Run, *, share: float = 1.0) -> Fix | None:
    """The fewest changes after which all fits, training and sync in `share` of a GPU; of equally many those with the
    shortest step. Optimizer state on the host comes after all that do without, since its time is not known; more
    GPUs come last."""
    for host in (False, True):
        for number in range(1, MOST_CHANGES + 1):
            best = _best(run, number, host=host, share=share)
            if best is not None:
                return best
    for factor in MORE_GPUS:
        larger = replace(run, layout=replace(run.layout, gpus=run.layout.gpus * factor))
        for number in range(MOST_CHANGES):
            best = _best(larger, number, host=False, share=share)
            if best is not None:
                return replace(best, more_gpus=True)
    return None


def _best(run: Run, number: int, *, host: bool, share: float) -> Fix | None:
    """The fastest that fits of all runs with `number` settings changed."""
    found: list[Fix] = []
    for kinds in combinations(_KINDS, number):
        if host != (_optimizer_offload in kinds):
            continue
        for keys, changed in _changed(run, kinds):
            try:
                plan = changed.plan()
            except UserError:  # a layout that the model or the GPUs rule out
                continue
            if not plan.problem and plan.share <= share:
                found.append(Fix(keys, plan))
    return min(found, key=lambda fix: fix.plan.step_s) if found else None


def _changed(run: Run, kinds: tuple[_Kind, ...]) -> Iterator[_Change]:
    if not kinds:
        yield (), run
        return
    for keys, once in kinds[0](run):
        for more, twice in _changed(once, kinds[1:]):
            yield (*keys, *more), twice


def _recompute(run: Run) -> Iterator[_Change]:
    leaner: dict[Recompute, tuple[Recompute, ...]] = {
        "none": ("activation", "full") if run.layout.model.moe else ("full",),
        "activation": ("full",),
        "selective": ("none", "full"),
        "full": (),
    }
    if run.layout.recompute_layers is not None:
        yield ("actor.recompute_layers=null",), _with(run, recompute_layers=None)
    for recompute in leaner[run.layout.recompute]:
        changed = _with(run, recompute=recompute)
        if recompute == "full" and run.layout.parallel.overlap_expert_exchange:
            whole = _with_sizes(changed, overlap_expert_exchange=False)
            yield ("actor.recompute=full", "parallel.overlap_expert_exchange=false"), whole
        else:
            yield (f"actor.recompute={recompute}",), changed


def _pack(run: Run) -> Iterator[_Change]:
    """As long as the longest sequence, padded to what the ranks divide."""
    parallel = run.layout.parallel
    shortest = Split(parallel.context, parallel.tensor).pack_rows(np.array([run.workload.sequence]))
    if shortest != run.layout.microbatch_tokens:
        yield (f"actor.max_tokens_per_microbatch={shortest}",), _with(run, microbatch_tokens=shortest)


def _tensor(run: Run) -> Iterator[_Change]:
    for size in _larger(run, "tensor", SIZES):
        keys: tuple[str, ...] = (f"parallel.tensor={size}",)
        if not run.layout.parallel.sequence_parallel:
            keys += ("parallel.sequence_parallel=true",)
        yield keys, _with_sizes(run, tensor=size, sequence_parallel=True)


def _context(run: Run) -> Iterator[_Change]:
    for size in _larger(run, "context", SIZES):
        yield (f"parallel.context={size}",), _with_sizes(run, context=size)


def _expert(run: Run) -> Iterator[_Change]:
    moe = run.layout.model.moe
    for size in _larger(run, "expert", tuple(range(1, moe.experts + 1))) if moe else ():
        if moe is not None and moe.experts % size == 0:
            yield (f"parallel.expert={size}",), _with_sizes(run, expert=size)


def _pipeline(run: Run) -> Iterator[_Change]:
    for size in _larger(run, "pipeline", tuple(range(1, run.layout.model.layers // 2 + 1))):
        yield (f"parallel.pipeline={size}",), _with_sizes(run, pipeline=size)


def _optimizer_offload(run: Run) -> Iterator[_Change]:
    for fraction in (0.5, 1.0):
        if fraction > run.layout.optimizer_offload:
            yield (f"optimizer.cpu_offload_fraction={fraction}",), _with(run, optimizer_offload=fraction)


def _engine_tensor(run: Run) -> Iterator[_Change]:
    """Larger engines on the same GPUs."""
    gpus, now = run.rollout_gpus or run.layout.gpus, run.settings.tensor or 1
    for size in ENGINE_SIZES:
        if size > now and gpus % size == 0 and run.layout.model.heads % size == 0:
            keys: tuple[str, ...] = (f"rollout.tensor_parallel={size}",)
            if run.rollout_gpus:
                keys += (f"rollout.engines={gpus // size}",)
            yield keys, replace(run, settings=replace(run.settings, tensor=size))


def _engine_memory(run: Run) -> Iterator[_Change]:
    """The engines' share of a GPU: the usual one, or less where the trainer's processes leave less."""
    utilization = largest_utilization(run.layout.gpu, shared=not run.rollout_gpus)
    settings = replace(run.settings, utilization=utilization, kv_cache=None)
    if settings != run.settings:
        keys: tuple[str, ...] = (f"rollout.gpu_memory_utilization={utilization:g}",)
        if run.settings.kv_cache is not None:
            keys += ("rollout.kv_cache_mib=null",)
        yield keys, replace(run, settings=settings)


_KINDS: tuple[_Kind, ...] = (
    _recompute,
    _tensor,
    _context,
    _expert,
    _pipeline,
    _pack,  # after the sizes that its multiple depends on
    _engine_tensor,
    _engine_memory,
    _optimizer_offload,
)


def _with(run: Run, **changes: object) -> Run:
    return replace(run, layout=replace(run.layout, **changes))  # type: ignore[arg-type]  # fields of Layout


def _with_sizes(run: Run, **sizes: int) -> Run:
    return _with(run, parallel=run.layout.parallel.model_copy(update=sizes))


def _larger(run: Run, name: str, sizes: tuple[int, ...]) -> Iterator[int]:
    """What of `sizes` is larger than that of today and divides the ranks."""
    now = getattr(run.layout.parallel, name)
    yield from (size for size in sizes if size > now and run.layout.gpus % size == 0)
