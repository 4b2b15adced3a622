"""Peak memory of a training rank by part."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_dppo.planner.activations import LayerMemory, layer_memory
from megatron_dppo.planner.gpus import GIB
from megatron_dppo.planner.parameters import Parameters, stage_adapters, stage_layers, stage_parameters
from megatron_dppo.planner.workload import Layout

_WEIGHT, _GRADIENT, _OPTIMIZER, _HOST_OPTIMIZER = 2, 4, 12, 16
"""Bytes per parameter: bf16 weights, float32 gradients, float32 master weights with Adam's two moments, and these with
a gradient where Megatron-Core's HybridDeviceOptimizer has them on the host."""
LIBRARY_WORKSPACE = 250 << 20
"""cuBLAS workspaces that torch and Transformer Engine allocate: 32 MiB for each of four streams of grouped products,
for dense products of either, and small tables."""
OUTSIDE_ALLOCATOR = int(2.5 * GIB)
"""CUDA context, NCCL buffers, cuDNN and kernels: memory of the GPU that torch does not count."""
FRAGMENTATION = 0.04
"""Share of the allocator's peak that is reserved and not used."""


@dataclass(frozen=True)
class StageMemory:
    """Bytes of every rank of one pipeline stage at its fullest moment, as `torch.cuda.max_memory_allocated` counts."""

    stage: int
    parameters: Parameters
    """Of the model, without adapters."""
    adapters: Parameters | None
    """None where all weights are trained."""
    weights: int
    """bf16, of the model."""
    adapter_weights: int
    """bf16."""
    gradients: int
    """float32, every trained parameter of the rank."""
    optimizer: int
    """float32 master weights and both moments of what is trained: this rank's share, without what is on the host."""
    host_optimizer: int
    """Bytes of the host: of what is offloaded, the same and a float32 gradient in page-locked memory."""
    activations: int
    """Kept for the backward, of all microbatches in flight."""
    workspace: int
    """What the fullest operator needs beside."""
    head_workspace: int
    """What the LM head's backward would need in its place; the larger of the two counts."""
    constant: int
    in_flight: int
    """Microbatches whose activations are kept at once (in model chunks / chunks)."""
    moment: str
    """What is running when memory is fullest."""

    @property
    def trained(self) -> Parameters:
        return self.parameters if self.adapters is None else self.adapters

    @property
    def static(self) -> int:
        return self.weights + self.adapter_weights + self.gradients + self.optimizer + self.constant

    @property
    def peak(self) -> int:
        return self.static + self.activations + max(self.workspace, self.head_workspace)

    @property
    def on_gpu(self) -> int:
        """Bytes of the GPU, with what the allocator does not see."""
        return int(self.peak * (1 + FRAGMENTATION)) + OUTSIDE_ALLOCATOR


def stage_memory(layout: Layout, stage: int, microbatches: int) -> StageMemory:
    """`microbatches` per data-parallel rank and gradient step."""
    model, parallel = layout.model, layout.parallel
    parameters = stage_parameters(model, parallel, stage)
    adapters = stage_adapters(model, parallel, stage, layout.lora) if layout.lora else None
    trained = parameters if adapters is None else adapters
    wholly = replace(layout, recompute_layers=None)
    chunks = [
        (
            [(layer_memory(wholly, layer), count) for layer, count in again],
            [(layer_memory(layout, layer), count) for layer, count in once],
        )
        for again, once in stage_layers(model.layers, parallel)[stage].divided(model, layout.recomputed_layers)
    ]
    last = stage == parallel.pipeline - 1
    in_flight = chunks_in_flight(layout, stage, microbatches)
    dense = -(-trained.dense // layout.dense_copies)
    experts = -(-trained.experts // layout.expert_copies)
    offloaded = int(layout.optimizer_offload * (dense + experts))
    kept = sum(
        sum(count * layer.boundary for layer, count in again) + sum(count * layer.kept for layer, count in once)
        for again, once in chunks
    )
    boundary = 2 * layout.rows_per_rank * model.hidden_size
    # The input of the stage (an embedding's output or what the neighbour sent) is the first layer's input.
    activations = round(in_flight * kept)
    if last:
        activations += 2 * boundary  # the final norm's input and output
    if parallel.pipeline > 1:
        activations += round(in_flight) * boundary  # outputs sent on, and gradients received
    workspace, moment = max(_chunk_workspace(again, once) for again, once in chunks)
    if parallel.overlap_expert_exchange and microbatches > 1:
        # A layer's experts are through their backward before those of the next microbatch begin, its attention is not.
        workspace += max((layer.kept_before_experts for _, once in chunks for layer, _ in once), default=0)
        moment = f"{moment} beside the next microbatch's forward"
    head = head_workspace(layout) if last else 0
    return StageMemory(
        stage=stage,
        parameters=parameters,
        adapters=adapters,
        weights=_WEIGHT * parameters.total,
        adapter_weights=0 if adapters is None else _WEIGHT * adapters.total,
        gradients=_GRADIENT * trained.total,
        optimizer=_OPTIMIZER * (dense + experts - offloaded),
        host_optimizer=_HOST_OPTIMIZER * offloaded,
        activations=activations,
        workspace=workspace,
        head_workspace=head,
        constant=LIBRARY_WORKSPACE,
        in_flight=round(in_flight),
        moment=moment if workspace >= head else "LM head, backward",
    )


def _chunk_workspace(again: list[tuple[LayerMemory, int]], once: list[tuple[LayerMemory, int]]) -> tuple[int, str]:
    """Bytes beside what is kept of all layers, at the fullest operator. When the first layer is recomputed, those that
    are not, behind it, have had their backward."""
    freed = sum(count * layer.kept for layer, count in once)
    workspace, moment = _layer_workspace([layer for layer, _ in again], full=True)
    return max((workspace - freed, moment), _layer_workspace([layer for layer, _ in once], full=False))


def _layer_workspace(layers: list[LayerMemory], *, full: bool) -> tuple[int, str]:
    """The same of layers that are all recomputed, or all not."""
    best = (0, "")
    for layer in layers:
        # The input of one that is recomputed is counted already. As large is what there is besides: in its forward the
        # gradient of its output, in its backward the output made again.
        base = 0 if full else layer.kept
        name = "recomputed layer" if full else "layer"
        best = max(
            best,
            (layer.forward_peak - base, f"{name}, forward"),
            (layer.backward_peak - base, f"{name}, backward"),
        )
    return best


def head_workspace(layout: Layout) -> int:
    """Bytes of TokenStats' backward: half-precision logit gradients of a vocabulary chunk (512 MiB, or 4,096 columns),
    the float32 hidden gradient, then a placeholder gradient of the weight (unless that is frozen); gathered hidden
    states under sequence parallelism."""
    model, tokens = layout.model, layout.tokens_per_rank
    columns = model.padded_vocab_size(layout.parallel.tensor) // layout.parallel.tensor
    chunk = max(4096, (512 << 20) // (2 * tokens))
    buffer = 2 * tokens * min(chunk, columns)
    hidden = 4 * tokens * model.hidden_size
    gathered = 2 * tokens * model.hidden_size if layout.parallel.sequence_parallel else 0
    placeholder = 0 if layout.lora else 2 * columns * model.hidden_size
    return gathered + hidden + max(buffer, placeholder + hidden // 2)


def chunks_in_flight(layout: Layout, stage: int, microbatches: int) -> float:
    """Microbatches kept at once: the warm-up of the 1F1B or interleaved schedule, and the one running. What runs beside
    a backward is one chunk ahead of it."""
    stages, chunks = layout.parallel.pipeline, layout.parallel.chunks
    if stages == 1:
        return 1
    if chunks == 1:
        return min(stages - stage, microbatches)
    warm_up = (stages - stage - 1) * 2 + (chunks - 1) * stages + layout.parallel.overlap_expert_exchange
    return min(warm_up + 1, microbatches * chunks) / chunks
