"""Memory and speed of a vLLM engine for the same model."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dppo.models.hf_config import HFConfig
from megatron_dppo.planner.efficiency import Efficiency, efficiency_of
from megatron_dppo.planner.gpus import GIB, Gpu
from megatron_dppo.planner.parameters import active_per_token, whole_model
from megatron_dppo.planner.workload import Workload

UTILIZATION = 0.9
"""`rollout.gpu_memory_utilization`."""
WORKSPACE = int(4 * GIB)
"""Per GPU: activations of `max_num_batched_tokens`, CUDA graphs, NCCL."""
ENGINE_SIZES = (1, 2, 4, 8)
"""GPUs of an engine: within a node."""
LARGEST_WEIGHT_SHARE = 0.6
"""Of the usable memory; what is left must hold a KV cache worth having."""


@dataclass(frozen=True)
class EnginePlan:
    """One engine of `tensor` GPUs; `engines` of them are the fleet."""

    tensor: int
    engines: int
    weights: int
    """Bytes per GPU."""
    kv_cache: int
    """Bytes per GPU left for keys and values."""
    kv_per_token: int
    """Bytes per GPU and token."""
    concurrent: int
    """Sequences of full length whose cache fits at once."""
    decode_tokens_per_second: float
    """Of the fleet."""

    @property
    def fits(self) -> bool:
        return self.concurrent >= 1


def plan_engine(
    model: HFConfig,
    gpu: Gpu,
    gpus: int,
    workload: Workload,
    *,
    taken: int = 0,
    tensor: int | None = None,
) -> EnginePlan:
    """The smallest engine whose weights leave room for a cache, repeated over `gpus`.

    taken   bytes of every card that a trainer on the same cards keeps while engines generate
    tensor  GPUs of an engine, where that is decided already
    """
    e = efficiency_of(gpu.name)
    sizes = [tensor] if tensor else [n for n in ENGINE_SIZES if n <= gpus and model.heads % n == 0]
    usable = int(UTILIZATION * gpu.memory) - taken
    plans = [_engine(model, gpu, gpus, workload, n, usable, e) for n in sizes]
    for plan in plans:
        if plan.fits and plan.weights <= LARGEST_WEIGHT_SHARE * usable:
            return plan
    return max(plans, key=lambda plan: (plan.kv_cache, plan.tensor))


def _engine(
    model: HFConfig, gpu: Gpu, gpus: int, workload: Workload, tensor: int, usable: int, e: Efficiency
) -> EnginePlan:
    weights = 2 * whole_model(model).total // tensor
    kv_heads = max(1, model.kv_heads // tensor)
    kv_per_token = 2 * 2 * model.layers * kv_heads * model.head_dim
    room = usable - weights - WORKSPACE
    concurrent = max(0, room // (kv_per_token * workload.sequence))
    engines = max(1, gpus // tensor)
    return EnginePlan(
        tensor=tensor,
        engines=engines,
        weights=weights,
        kv_cache=max(0, room),
        kv_per_token=kv_per_token,
        concurrent=concurrent,
        decode_tokens_per_second=engines * _decode_rate(model, gpu, workload, tensor, kv_per_token, concurrent, e),
    )


def _decode_rate(
    model: HFConfig, gpu: Gpu, workload: Workload, tensor: int, kv_per_token: int, concurrent: int, e: Efficiency
) -> float:
    """Tokens/s of one engine: each step reads the weights of the experts hit and the cache, and the host handles what
    is recorded of each token."""
    mean = workload.prompt_tokens + workload.mean_response_tokens / 2
    sequences = max(1, min(256, int(concurrent * workload.sequence / mean)))
    read = 2 * _weights_read(model, sequences) / tensor + sequences * mean * kv_per_token
    step = read / (gpu.memory_bandwidth * e.decode)
    step = max(step, 2 * sequences * active_per_token(model) / tensor / (gpu.bf16_flops * e.grouped))
    return sequences / (step + sequences * e.engine_token_s)


def _weights_read(model: HFConfig, sequences: int) -> float:
    """Parameters that a decoding step of `sequences` tokens touches: all dense ones, and of `E` experts those that at
    least one token chose, `E (1 - (1 - k/E)^n)` for even routing."""
    parameters = whole_model(model)
    dense = parameters.dense - parameters.embedding
    if model.moe is None:
        return dense
    hit = 1.0 - (1.0 - model.moe.topk / model.moe.experts) ** sequences
    return dense + parameters.experts * hit
