"""What a weight sync takes of a GPU, as `rollout/weight_transfer` and `rollout/vllm` make it of a model.

- Two buckets are under way, each of `rollout.weight_sync_bucket_mib` or of the largest tensor that goes whole; a third
  on the trainer's GPUs where ranks own experts that the worker on their GPU does not need, and with adapters what is
  merged of one, in float32.
- While it loads, vLLM keeps the whole matrices of a layer that it quantises, makes that layer anew, with its padding,
  and quantises it; of others nothing but a tensor of all experts, put together from their blocks.
- In its first sync an engine makes a layer anew beside the dense tensors of a bucket, random numbers all.
- All of this is given back when the sync ends, but for the two buckets of an engine with GPUs of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from megatron_dppo.models.parallel import ParallelConfig
from megatron_dppo.models.stacked import OfAll
from megatron_dppo.planner.engine import EngineSettings, filled, own_experts
from megatron_dppo.planner.parameters import layer_parameters, stage_layers
from megatron_dppo.planner.workload import Layout


@dataclass(frozen=True)
class SyncMemory:
    """Bytes of a GPU of an engine beside weights."""

    usual: int
    first: int
    """In the first sync, in which the engine finds out where tensors go (`rollout/vllm/views.py: TrialLoad`)."""


def sync_memory(layout: Layout, settings: EngineSettings, tensor: int, *, colocated: bool) -> SyncMemory:
    """`tensor`: GPUs of an engine. `colocated`: buckets lie in the memory of trainer ranks on the same GPUs, else in
    the engine's."""
    model, one = layout.model, ParallelConfig()
    kinds = [layer for layer, _ in stage_layers(model.layers, one)[0].kinds(model)]
    sizes: dict[bool, list[int]] = {False: [], True: []}
    for table in (model.family.ends, *(model.layer_tables[layer] for layer in kinds)):
        for transform in table.values():
            sizes[isinstance(transform, OfAll)] += [2 * prod(s) for s in transform.sources(model).values()]
    largest, of_all = max(sizes[False]), max(sizes[True], default=0)
    share = expert_share(layout, settings, tensor, colocated=colocated)
    bucket = max(settings.bucket, largest, int(of_all * share))
    buckets = 2 * bucket
    if colocated:
        others = share < 1 and layout.parallel.expert != tensor
        buckets += others * bucket + (2 * settings.bucket if layout.lora else 0)

    layers = [layer_parameters(model, one, layer) for layer in kinds]
    padded = [replace(p, experts=int(p.experts * filled(model, tensor, settings))) for p in layers]
    anew = settings.element * max(largest // 2, *(parameters.total for parameters in padded)) // tensor
    loading = of_all
    if settings.quantized:
        own = own_experts(model, tensor, settings) if settings.expert_parallel else 1.0
        whole = max(max(own * p.experts, p.mlp, p.attention) for p in layers)
        loading = int(2 * whole) + 3 * max(max(p.experts, p.mlp, p.attention) for p in padded) // tensor
        anew += anew // 2
    return SyncMemory(
        usual=buckets + loading,
        first=max(buckets + loading, 2 * bucket + anew + max(settings.bucket, largest, of_all)),
    )


def expert_share(layout: Layout, settings: EngineSettings, tensor: int, *, colocated: bool) -> float:
    """Of the experts' bytes, what a GPU of an engine is sent: `WeightBuckets` divides no experts that ranks divide, and
    no tensor of all experts into slices or unequal shares; slices go to a fleet alone, and not of merged matrices."""
    model = layout.model
    if not settings.shares or model.moe is None or layout.parallel.expert_tensor > 1:
        return 1.0
    in_one = any(isinstance(transform, OfAll) for table in model.layer_tables for transform in table.values())
    if settings.expert_parallel:
        whole = in_one and model.moe.experts % tensor > 0
    else:
        whole = colocated or in_one or layout.lora is not None or model.moe.intermediate_size % tensor > 0
    return 1.0 if whole else own_experts(model, tensor, settings)
