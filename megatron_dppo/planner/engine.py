"""Memory and speed of a vLLM engine for the same model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from megatron_dppo.models.hf_config import HFConfig
from megatron_dppo.planner.gpus import GIB, Gpu, efficiency_of
from megatron_dppo.planner.parameters import Parameters, active_per_token, whole_model
from megatron_dppo.planner.workload import Workload

UTILIZATION = 0.9
"""`rollout.gpu_memory_utilization` of a searched plan."""
WORKSPACE = int(4 * GIB)
"""Per GPU: activations of `max_num_batched_tokens`, CUDA graphs, NCCL."""
ENGINE_SIZES = (1, 2, 4, 8)
"""GPUs of an engine: within a node."""
BLOCK = 128
"""Rows and columns of what has an FP8 scale of its own."""
LARGEST_WEIGHT_SHARE = 0.6
"""Of the usable memory; what is left must hold a KV cache worth having."""


@dataclass(frozen=True)
class EngineSettings:
    """What is decided of the engines."""

    tensor: int | None = None
    """GPUs of an engine (`rollout.tensor_parallel`); None takes the smallest whose weights leave room for a cache."""
    utilization: float = UTILIZATION
    """Share of a GPU that an engine may use (`rollout.gpu_memory_utilization`)."""
    kv_cache: int | None = None
    """Bytes of keys and values per GPU (`rollout.kv_cache_mib`), whatever `utilization` says; None: what is left."""
    max_sequences: int = 256
    """Decoded together (`rollout.max_num_seqs`)."""
    element: int = 2
    """Bytes of a weight, and of a key or a value (`rollout.dtype`)."""
    quantized: bool = False
    """Whether matrices but the router, embedding and head take a byte a number (`rollout.quantization`)."""
    cache_element: int | None = None
    """Bytes of a key or a value where that is not `element` (`rollout.kv_cache_dtype`)."""
    bucket: int = 256 << 20
    """Bytes of weights under way at once in a sync (`rollout.weight_sync_bucket_mib`)."""
    shares: bool = True
    """Whether a GPU of an engine may get what it needs of the experts alone (`RolloutConfig.weight_shares`)."""
    expert_parallel: bool = False
    """Whether that is experts of its own, not slices of all (`rollout.expert_parallel`)."""
    sleeps: bool = True
    """Whether an engine on the trainer's GPUs gives its memory back while they train (`rollout.enable_sleep`)."""
    kept: int = 0
    """Bytes of optimizer state that stay on a GPU while a sleeping trainer's engine has it
    (`optimizer.keep_on_gpu_gib`)."""

    def bytes_of(self, weights: Parameters) -> float:
        """What an engine keeps of them: a float32 scale for each block that is quantised."""
        quantized = weights.attention + weights.experts + weights.mlp if self.quantized else 0
        return self.element * (weights.total - quantized) + quantized * (1 + 4 / BLOCK**2)


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
    """Of the fleet, as long as it has a step's sequences to decode."""

    @property
    def fits(self) -> bool:
        return self.concurrent >= 1

    @property
    def on_gpu(self) -> int:
        """Bytes of a GPU while engines generate, without what a trainer keeps there."""
        return self.weights + self.kv_cache + WORKSPACE


def plan_engine(
    model: HFConfig,
    gpu: Gpu,
    gpus: int,
    workload: Workload,
    settings: EngineSettings,
) -> EnginePlan:
    """Engines as `settings` has them, or the smallest whose weights leave room for a cache, repeated over `gpus`."""
    sizes = [n for n in ENGINE_SIZES if gpus % n == 0 and model.heads % n == 0]
    if settings.tensor:
        sizes = [settings.tensor]
    usable = int(settings.utilization * gpu.memory)
    plans = [_engine(model, gpu, gpus, workload, n, usable, settings) for n in sizes]
    for plan in plans:
        if plan.fits and plan.weights <= LARGEST_WEIGHT_SHARE * usable:
            return plan
    return max(plans, key=lambda plan: (plan.kv_cache, plan.tensor))


def _engine(
    model: HFConfig, gpu: Gpu, gpus: int, workload: Workload, tensor: int, usable: int, settings: EngineSettings
) -> EnginePlan:
    weights = int(settings.bytes_of(_held(model, tensor, settings)) // tensor)
    width = 2 * max(1, model.kv_heads // tensor) * model.head_dim
    if model.latent:  # the latent vector and the rotary key, whole on every rank
        width = model.latent.rank + model.latent.rotary_dim
    kv_per_token = (settings.cache_element or settings.element) * model.attention_layers * width
    room = usable - weights - WORKSPACE if settings.kv_cache is None else settings.kv_cache
    concurrent = max(0, room // (kv_per_token * workload.sequence + _state(model, settings) // tensor))
    engines = max(1, gpus // tensor)
    plan = EnginePlan(
        tensor=tensor,
        engines=engines,
        weights=weights,
        kv_cache=max(0, room),
        kv_per_token=kv_per_token,
        concurrent=concurrent,
        decode_tokens_per_second=0.0,
    )
    return replace(plan, decode_tokens_per_second=_decode_rate(model, gpu, workload, plan, settings))


def own_experts(model: HFConfig, tensor: int, settings: EngineSettings) -> float:
    """Of the experts' numbers, what the GPU of an engine has that has most: slices of all, or whole ones. Of a model
    without experts as of slices."""
    if model.moe is None or not settings.expert_parallel:
        return 1 / tensor
    return -(-model.moe.experts // tensor) / model.moe.experts


def filled(model: HFConfig, tensor: int, settings: EngineSettings) -> float:
    """How many times an expert's numbers a GPU has: vLLM fills both sides of those that it quantises up to blocks of
    scales."""
    if model.moe is None or not settings.quantized:
        return 1.0
    width = model.moe.intermediate_size // (1 if settings.expert_parallel else tensor)
    return prod(-(-side // BLOCK) * BLOCK / side for side in (width, model.hidden_size))


def _held(model: HFConfig, tensor: int, settings: EngineSettings) -> Parameters:
    """On `tensor` GPUs, each as full as the fullest."""
    held = whole_model(model)
    if model.moe is None:
        return held
    own = tensor * own_experts(model, tensor, settings) * filled(model, tensor, settings)
    return replace(held, experts=round(held.experts * own))


def _state(model: HFConfig, settings: EngineSettings) -> int:
    """Bytes that the delta rules' layers keep of a sequence, however long: a state of each head in float32, and the
    tokens that convolutions look back on."""
    if not (delta := model.delta):
        return 0
    convolved = settings.element * (delta.convolution - 1) * delta.convolved
    return sum(delta.layers) * (4 * delta.width * delta.key_dim + convolved)


def _decode_rate(model: HFConfig, gpu: Gpu, workload: Workload, engine: EnginePlan, settings: EngineSettings) -> float:
    """Tokens/s of the fleet: each step of an engine reads the weights of the experts hit and the cache, and the host
    handles what is recorded of each token."""
    e = efficiency_of(gpu.name)
    mean = workload.prompt_tokens + workload.mean_response_tokens / 2
    share = -(-workload.sequences // engine.engines)
    sequences = max(1, min(settings.max_sequences, share, int(engine.concurrent * workload.sequence / mean)))
    kept = mean * engine.kv_per_token + 2 * _state(model, settings) / engine.tensor  # a state is written too
    read = settings.bytes_of(_weights_read(model, sequences)) / engine.tensor + sequences * kept
    step = read / (gpu.memory_bandwidth * e.decode)
    step = max(step, 2 * sequences * active_per_token(model) / engine.tensor / (gpu.bf16_flops * e.grouped))
    together = min(engine.engines * sequences, workload.sequences)
    return together / (step + sequences * e.engine_token_s)


def _weights_read(model: HFConfig, sequences: int) -> Parameters:
    """Parameters that a decoding step of `sequences` tokens touches: all dense ones, and of `E` experts those that at
    least one token chose, `E (1 - (1 - k/E)^n)` for even routing."""
    parameters = replace(whole_model(model), embedding=0)
    if model.moe is None:
        return parameters
    hit = 1.0 - (1.0 - model.moe.topk / model.moe.experts) ** sequences
    return replace(parameters, experts=round(parameters.experts * hit))
