"""Seconds of one gradient step: a roofline over operators, with the host's time where the GPU waits for it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from megatron_dppo.planner.adapters import adapter_calls, adapter_tensors, adapter_work
from megatron_dppo.planner.gpus import Efficiency, efficiency_of
from megatron_dppo.planner.memory import chunks_in_flight
from megatron_dppo.planner.parameters import layer_parameters, stage_layers, trained_parameters
from megatron_dppo.planner.workload import Layout


@dataclass(frozen=True)
class PassTime:
    """Seconds of one microbatch on one stage."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        return self.forward + self.backward

    def __add__(self, other: PassTime) -> PassTime:
        return PassTime(self.forward + other.forward, self.backward + other.backward)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one gradient step."""

    compute: float
    """Forward and backward of all microbatches on the slowest stage."""
    bubble: float
    """Pipeline stages waiting for the first and the last microbatch."""
    gradients: float
    """Reduction over data-parallel ranks, zeroing, the check and the norm."""
    optimizer: float
    """Adam, copies, and the gather of the new weights."""

    @property
    def total(self) -> float:
        return self.compute + self.bubble + self.gradients + self.optimizer


def step_time(layout: Layout, microbatches: int, efficiency: Efficiency | None = None) -> StepTime:
    """`microbatches` per data-parallel rank; all of `layout.microbatch_tokens`. `efficiency`: that of the GPU."""
    efficiency = efficiency or efficiency_of(layout.gpu.name)
    stages = [_stage(layout, stage, efficiency) for stage in range(layout.parallel.pipeline)]
    slowest = max(stages, key=lambda time: time.both)
    others = sum(time.both for time in stages) - slowest.both
    stage = stages.index(slowest)
    beside = max(0.0, microbatches - chunks_in_flight(layout, stage, microbatches))
    return StepTime(
        compute=microbatches * (slowest.both + efficiency.microbatch_s) - beside * _hidden(layout, stage, efficiency),
        bubble=others / layout.parallel.chunks,
        gradients=max(_gradients(layout, stage, efficiency) for stage in range(len(stages))),
        optimizer=max(_optimizer(layout, stage, efficiency) for stage in range(len(stages))),
    )


def _stage(layout: Layout, stage: int, e: Efficiency) -> PassTime:
    """In the forward every MoE layer waits for the GPU (how many rows an expert gets), so the longer of the GPU's and
    the host's time counts layer by layer. In the backward nothing waits: the host runs ahead; the longer sum counts."""
    forward = 0.0
    device = host = 0.0
    chunks = stage_layers(layout.model.layers, layout.parallel)[stage].divided(layout.model, layout.recomputed_layers)
    for chunk in chunks:
        for recomputed, kinds in zip((True, False), chunk, strict=True):
            of = replace(layout, recompute_layers=None) if recomputed else layout
            for layer, count in kinds:
                work, launch = layer_time(of, layer, e), _host(layout, layer, e)
                one = max(work.forward, launch.forward)
                again = one if recomputed else 0.0  # the forward once more, waiting as it does
                forward += count * one
                device += count * (work.backward + again)
                host += count * (launch.backward + again)
    if stage == layout.parallel.pipeline - 1:
        head = head_time(layout, e)
        forward += head.forward
        device += head.backward
    total = PassTime(forward, max(device, host))
    if layout.parallel.pipeline > 1:
        boundary = 2 * layout.rows_per_rank * layout.model.hidden_size
        sent = boundary / bandwidth(layout, layout.gpus // layout.parallel.pipeline + 1, e)
        total += PassTime(sent, sent)
    return total


def _hidden(layout: Layout, stage: int, e: Efficiency) -> float:
    """Of the exchange between experts' ranks in a microbatch's forward and another one's backward, what runs behind
    their computation: no more than the GPU takes longer than the host."""
    if not layout.parallel.overlap_expert_exchange:
        return 0.0
    hidden = 0.0
    for layer, count in stage_layers(layout.model.layers, layout.parallel)[stage].kinds(layout.model):
        if layout.model.is_moe_layer(layer):
            spare = layer_time(layout, layer, e).both - _host(layout, layer, e).both
            hidden += count * max(0.0, min(2 * e.hidden_exchange * _exchange(layout, e), spare))
    return hidden


def head_time(layout: Layout, e: Efficiency) -> PassTime:
    """One product forward, three backward (logits again, and the gradients of the hidden states and of the weight; two
    where that is frozen), and the collectives of TokenStats."""
    model, tensor = layout.model, layout.parallel.tensor
    flops = 2 * layout.tokens_per_rank * model.hidden_size * model.padded_vocab_size(tensor) / tensor
    product = flops / (layout.gpu.bf16_flops * e.head)
    whole = layout.tokens_per_rank * model.hidden_size
    gather = all_gather(layout, 2 * whole, tensor, tensor, e) if layout.parallel.sequence_parallel else 0.0
    reduce = 2 * all_gather(layout, 4 * whole, tensor, tensor, e)
    if layout.parallel.sequence_parallel:
        reduce = reduce / 2 + gather
    return PassTime(product + gather + 1e-3, (2 if layout.lora else 3) * product + reduce + 1e-3)


def layer_time(layout: Layout, layer: int, e: Efficiency) -> PassTime:
    """The GPU's time for one decoder layer; the backward without recomputed layers, but with what is within."""
    mixer = _delta_rule(layout, e) if layout.model.is_delta_layer(layer) else _attention(layout, layer, e)
    total = mixer + _mlp(layout, layer, e) + _adapters(layout, layer, e)
    if layout.recompute == "selective" and not layout.model.is_delta_layer(layer):
        core = _core_attention(layout, layer) / (layout.gpu.bf16_flops * e.attention_forward)
        total += PassTime(0.0, core)
    return total


def _host(layout: Layout, layer: int, e: Efficiency) -> PassTime:
    """What Python and the launches of one layer take; the GPU waits where it is faster."""
    experts = 0
    if layout.model.moe is not None and layout.model.is_moe_layer(layer):
        experts = layout.model.moe.experts // layout.parallel.expert
    # A frozen expert's backward is two of the four launches, and no gradient hooks.
    backward = e.expert_backward_s / 2 if layout.lora else e.expert_backward_s
    adapters = adapter_calls(layout, layer) * e.adapter_s if layout.lora else 0.0
    return PassTime(
        e.layer_forward_s + experts * e.expert_forward_s + adapters,
        e.layer_backward_s + experts * backward + adapters,
    )


def _adapters(layout: Layout, layer: int, e: Efficiency) -> PassTime:
    """Products with a side of `rank` are bound by memory: FLOPs and bytes both count."""
    if layout.lora is None:
        return PassTime(0.0, 0.0)
    work = adapter_work(layout, layer)
    products = work.flops / (layout.gpu.bf16_flops * e.grouped)
    memory = layout.gpu.memory_bandwidth * e.memory
    tensor = layout.parallel.tensor
    comm = all_gather(layout, work.gathered, tensor, tensor, e)
    return PassTime(
        products + work.forward_bytes / memory + comm,
        2 * products + work.backward_bytes / memory + comm,
    )


def _core_attention(layout: Layout, layer: int) -> float:
    """FLOPs of causal attention's forward on one rank: two products over half of the square, or the window."""
    heads = layout.model.heads / layout.parallel.tensor
    span = layout.attention_span
    of_a_token = float(layout.model.pairs(layer, np.array(span))) / span
    return 4 * layout.tokens_per_rank * of_a_token * heads * layout.model.head_dim


def _attention(layout: Layout, layer: int, e: Efficiency) -> PassTime:
    model, parallel, gpu = layout.model, layout.parallel, layout.gpu
    tokens, rows, hidden = layout.tokens_per_rank, layout.rows_per_rank, model.hidden_size
    q, k = (n * model.head_dim / parallel.tensor for n in (model.heads, model.kv_heads))
    weights = layer_parameters(model, parallel, layer).attention
    products = 2 * tokens * weights / (gpu.bf16_flops * e.dense)
    core = _core_attention(layout, layer)
    bytes_moved = 2 * (rows * hidden * 7 + tokens * (6 * (q + k) + 2 * k))
    elementwise = bytes_moved / (gpu.memory_bandwidth * e.memory)
    tensor_comm = 2 * all_gather(layout, 2 * tokens * hidden, parallel.tensor, parallel.tensor, e)
    ring = 0.0
    if parallel.context > 1:
        size = 2 * 2 * tokens * k * (parallel.context - 1)
        ring = size / bandwidth(layout, parallel.tensor * parallel.context, e)
    forward = products + core / (gpu.bf16_flops * e.attention_forward) + elementwise + tensor_comm
    # The ring overlaps with attention, what is longer counts.
    forward += max(0.0, ring - core / (gpu.bf16_flops * e.attention_forward))
    # The normalised input is gathered again for the weight's gradient.
    gathers = (1.0 if layout.lora else 1.5) * tensor_comm
    backward = (
        _backward_products(layout) * products
        + 2.5 * core / (gpu.bf16_flops * e.attention_backward)
        + 1.6 * elementwise
        + gathers
    )
    backward += max(0.0, 2 * ring - 2.5 * core / (gpu.bf16_flops * e.attention_backward))
    return PassTime(forward, backward)


def _delta_rule(layout: Layout, e: Efficiency) -> PassTime:
    """Products of the projections; in the rule chunks of 64 tokens among themselves and with the states, at the
    efficiency of attention; and what moves through memory. Not yet measured."""
    model, parallel, gpu, delta = layout.model, layout.parallel, layout.gpu, layout.model.delta
    assert delta is not None
    tokens, rows, hidden = layout.tokens_per_rank, layout.rows_per_rank, model.hidden_size
    value, heads = delta.width / parallel.tensor, delta.value_heads / parallel.tensor
    convolved = delta.convolved / parallel.tensor
    products = 2 * tokens * hidden * (convolved + 2 * value + 2 * heads) / (gpu.bf16_flops * e.dense)
    states = 3 * delta.key_dim * delta.value_dim + 64 * 2 * (delta.key_dim + delta.value_dim)
    core = 2 * tokens * heads * states / gpu.bf16_flops
    moved = 2 * (7 * rows * hidden + tokens * (4 * convolved + 6 * heads * delta.key_dim + 14 * value))
    elementwise = moved / (gpu.memory_bandwidth * e.memory)
    comm = 2 * all_gather(layout, 2 * tokens * hidden, parallel.tensor, parallel.tensor, e)
    if parallel.context > 1:  # all tokens of a share of the heads, and back
        size = 2 * tokens * (convolved + 2 * value) * (parallel.context - 1) / parallel.context
        comm += size / bandwidth(layout, parallel.tensor * parallel.context, e)
    return PassTime(
        products + core / e.attention_forward + elementwise + comm,
        _backward_products(layout) * products
        + 2.5 * core / e.attention_backward
        + 1.6 * elementwise
        + (1.0 if layout.lora else 1.5) * comm,
    )


def _mlp(layout: Layout, layer: int, e: Efficiency) -> PassTime:
    model, parallel, gpu = layout.model, layout.parallel, layout.gpu
    if not model.is_moe_layer(layer):
        return _dense(layout, model.intermediate_size, e)
    assert model.moe is not None
    moe, rows, received, hidden = model.moe, layout.rows_per_rank, layout.expert_rows, model.hidden_size
    width = moe.intermediate_size / parallel.expert_tensor
    products = 6 * received * hidden * width / (gpu.bf16_flops * e.grouped)
    sent = rows * moe.topk * hidden
    moved = 2 * (7 * rows * hidden + 2 * sent + 4 * received * hidden + 3 * received * width)
    elementwise = (moved + rows * moe.experts * 4 * 8) / (gpu.memory_bandwidth * e.memory)
    comm = _exchange(layout, e)
    if parallel.expert_tensor > 1:
        comm += 2 * all_gather(layout, 2 * received * hidden, parallel.expert_tensor, parallel.expert_tensor, e)
    # What is computed again: the gated SiLU, and where experts are not divided the sorting of their rows.
    remade = 3 * received * width + (2 * received * hidden if parallel.expert * parallel.expert_tensor == 1 else 0)
    again = 2 * remade / (gpu.memory_bandwidth * e.memory) if layout.cheap_parts_again else 0.0
    backward = _backward_products(layout) * products + 1.2 * elementwise + again + comm
    routed = PassTime(products + elementwise + comm, backward)
    return routed + _dense(layout, moe.shared_size, e) if moe.shared_size else routed


def _exchange(layout: Layout, e: Efficiency) -> float:
    """Rows to the experts' ranks and back, in one pass of a layer."""
    assert layout.model.moe is not None
    return 2 * all_to_all(layout, 2 * layout.rows_per_rank * layout.model.moe.topk * layout.model.hidden_size, e)


def _dense(layout: Layout, size: int, e: Efficiency) -> PassTime:
    """An MLP of `size` that every token passes."""
    parallel, gpu, hidden, tokens = layout.parallel, layout.gpu, layout.model.hidden_size, layout.tokens_per_rank
    width = size / parallel.tensor
    products = 6 * tokens * hidden * width / (gpu.bf16_flops * e.dense)
    moved = 2 * (7 * layout.rows_per_rank * hidden + 3 * tokens * width)
    elementwise = moved / (gpu.memory_bandwidth * e.memory)
    comm = 2 * all_gather(layout, 2 * tokens * hidden, parallel.tensor, parallel.tensor, e)
    gathers = (1.0 if layout.lora else 1.5) * comm
    return PassTime(products + elementwise + comm, _backward_products(layout) * products + 1.6 * elementwise + gathers)


def _backward_products(layout: Layout) -> int:
    """Products of a weight's backward for one forward: the gradients of its input and, unless it is frozen, its own."""
    return 1 if layout.lora else 2


def _gradients(layout: Layout, stage: int, e: Efficiency) -> float:
    parameters = trained_parameters(layout.model, layout.parallel, stage, layout.lora)
    local = 3 * 4 * parameters.total / (layout.gpu.memory_bandwidth * e.stream)  # zero, check, norm
    span = layout.gpus // layout.parallel.pipeline
    sent = layout.reduced_bytes
    dense = all_gather(layout, sent * parameters.dense, layout.dense_copies, span, e)
    return local + dense + all_gather(layout, sent * parameters.experts, layout.expert_copies, span, e)


def _optimizer(layout: Layout, stage: int, e: Efficiency) -> float:
    model, parallel = layout.model, layout.parallel
    parameters = trained_parameters(model, parallel, stage, layout.lora)
    mine = parameters.dense / layout.dense_copies + parameters.experts / layout.expert_copies
    adam = 30 * mine / (layout.gpu.memory_bandwidth * e.stream)
    span = layout.gpus // parallel.pipeline
    gather = all_gather(layout, 2 * parameters.dense, layout.dense_copies, span, e)
    gather += all_gather(layout, 2 * parameters.experts, layout.expert_copies, span, e)
    tensors = sum(
        count * _trained_tensors(layout, layer)
        for layer, count in stage_layers(model.layers, parallel)[stage].kinds(model)
    )
    return adam + gather + tensors * e.parameter_s


def _trained_tensors(layout: Layout, layer: int) -> int:
    model = layout.model
    if layout.lora is not None:
        return adapter_tensors(layout, layer)
    if not model.is_moe_layer(layer):
        return 8 + 3
    assert model.moe is not None
    of_expert = 4 if model.moe.linear_bias else 2
    return 8 + of_expert * (model.moe.experts // layout.parallel.expert) + (2 if model.moe.shared_size else 0)


def bandwidth(layout: Layout, span: int, e: Efficiency) -> float:
    """Bytes/s of one GPU within a group whose ranks span `span` consecutive GPUs."""
    if span <= layout.gpu.gpus_per_node:
        return layout.gpu.link_bandwidth * e.link
    return layout.gpu.network_bandwidth * e.network


def all_gather(layout: Layout, size: float, ranks: int, span: int, e: Efficiency) -> float:
    """Seconds of an all-gather or reduce-scatter whose whole tensor has `size` bytes."""
    if ranks == 1:
        return 0.0
    return size * (ranks - 1) / ranks / bandwidth(layout, span, e)


def all_to_all(layout: Layout, size: float, e: Efficiency) -> float:
    """Seconds for `size` bytes of rows sent evenly to the expert-parallel ranks. Within a node NVLink, beyond the
    network carries the share of the other nodes."""
    ranks, span = layout.parallel.expert, layout.parallel.expert * layout.parallel.expert_tensor
    if ranks == 1:
        return 0.0
    node = layout.gpu.gpus_per_node
    if span <= node:
        return size * (ranks - 1) / ranks / bandwidth(layout, span, e)
    return size * (span - node) / span / bandwidth(layout, span, e)
