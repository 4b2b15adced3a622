"""What the adapters of one decoder layer add to a microbatch: launches, FLOPs, memory traffic, bytes between ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_dppo.models.lora.size import AdapterSize, adapter_sizes, joins
from megatron_dppo.planner.parameters import stage_layers
from megatron_dppo.planner.workload import Layout

_HALF = 2


@dataclass(frozen=True)
class AdapterWork:
    """Of one rank and microbatch."""

    flops: float
    """Of the forward. The backward has twice as many: gradients of inputs, and of A and B."""
    forward_bytes: float
    """Read and written on the GPU: the layer's input once, its output twice, where the share is added; four times for
    experts that take the share as a tensor of its own. `A x` is too narrow to matter."""
    backward_bytes: float
    """The output's gradient twice, the input for A's gradient, its own gradient, and the sum of that with the frozen
    layer's: five times the input in all, three where it is added in place."""
    gathered: float
    """`A x`, gathered or reduced over the tensor-parallel ranks; in the backward once more."""

    def __add__(self, other: AdapterWork) -> AdapterWork:
        return AdapterWork(**{name: value + getattr(other, name) for name, value in vars(self).items()})


def adapter_work(layout: Layout, layer: int) -> AdapterWork:
    """Of decoder layer number `layer`; nothing without LoRA. The gradients that expert-tensor-parallel ranks reduce are
    not in it."""
    total = AdapterWork(0.0, 0.0, 0.0, 0.0)
    if layout.lora is None:
        return total
    rows, tokens = layout.rows_per_rank, layout.tokens_per_rank
    for one in _adapters(layout, layer):
        low = one.kinds * layout.lora.rank
        read, written = (tokens, rows) if one.input_sharded else (rows, tokens)
        if one.experts:
            read = written = layout.expert_rows
        read, written = read * one.cols, written * one.rows
        joined = one.experts > 0 and joins(layout.lora.rank)
        in_place = joined or not one.experts
        total += AdapterWork(
            flops=2.0 * low * (read + written),
            forward_bytes=_HALF * (read + (2.0 if in_place else 4.0) * written),
            backward_bytes=_HALF * (2.0 * written + (3.0 if joined else 5.0) * read),
            gathered=0.0 if one.experts else _HALF * float(tokens) * low,
        )
    return total


def adapter_calls(layout: Layout, layer: int) -> int:
    """Products with an adapter that the host launches in a layer's forward."""
    assert layout.lora is not None
    grouped = joins(layout.lora.rank)
    return sum(1 if grouped else max(1, one.experts) for one in _adapters(layout, layer))


def adapter_tensors(layout: Layout, layer: int) -> int:
    """Trained tensors of a layer on one rank: an A and a B for each product."""
    return 2 * sum(1 for _ in _adapters(layout, layer))


def merged_tensors(layout: Layout, stage: int) -> int:
    """Hugging Face tensors with an adapter on a rank of pipeline stage `stage`: a weight sync merges each."""
    model, parallel = layout.model, layout.parallel
    if layout.lora is None:
        return 0
    return sum(
        count * sum(one.kinds * max(1, one.experts) for one in _adapters(layout, layer))
        for layer, count in stage_layers(model.layers, parallel)[stage].kinds(model)
    )


def _adapters(layout: Layout, layer: int) -> Iterator[AdapterSize]:
    if layout.lora is not None:
        yield from adapter_sizes(layout.model, layout.parallel, layer, layout.lora)
