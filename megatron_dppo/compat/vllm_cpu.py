"""vLLM on a machine without a GPU: the environment and options of its engine, and router-replay capture.

Facts of vLLM 0.26 that this module answers:
- its CPU platform replaces the in-core executor by a third process unless the executor is named by its class path;
- a request with a seed of its own whose prompt is prefilled in chunks ends the engine: the runner rewinds the random
  generator after a chunk, and torch's CPU generators cannot be rewound ("CPU Generator does not use offset");
- it wants a NUMA node for each worker of an engine, to bind its threads to;
- without a stated size the KV cache takes most of the machine's memory;
- the CPU mixture-of-experts kernels choose experts in `cpu_fused_moe.select_experts`, which never calls the capture
  function that the router of the layer holds, so recorded routes come out all zero;
- linear layers multiply by a packed copy of their weight, and reloading weights packs anew only the layers that a
  weight was loaded into: a head tied to the embedding keeps the old copy (5.8 nats off after a weight sync).
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    from megatron_dppo.rollout.config import RolloutConfig

_KV_CACHE_MIB = 256
"""Enough for tens of thousands of tokens of the models one runs on a CPU, and touched in well under a second."""


def on_cpu() -> bool:
    """Whether vLLM's platform in this process is the CPU."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def engine_environment(config: RolloutConfig) -> dict[str, str]:
    """Variables that the engine's processes need before they import torch; empty on a GPU."""
    if not on_cpu():
        return {}
    environment = {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": str(config.cpu_threads)}
    if config.tensor_parallel > 1:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return environment


def engine_options(config: RolloutConfig) -> dict[str, Any]:
    """Arguments of `AsyncEngineArgs` that a CPU needs on top of the common ones; empty on a GPU."""
    if not on_cpu():
        return {}
    options: dict[str, Any] = {
        "enforce_eager": True,
        "block_size": 32,
        "enable_chunked_prefill": False,
        "enable_sleep_mode": False,  # there is nothing to give back; vLLM refuses it here
        "max_num_batched_tokens": max(config.max_num_batched_tokens, config.max_model_len),
        "kv_cache_memory_bytes": (config.kv_cache_mib or _KV_CACHE_MIB) << 20,
    }
    if config.tensor_parallel == 1:
        options["distributed_executor_backend"] = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
    return options


def repack_tied_head(model: torch.nn.Module) -> None:
    """After weights were reloaded, pack heads anew whose weight is the embedding's. Does nothing on a GPU."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    if not on_cpu():
        return
    layers = [m for m in model.modules() if isinstance(m, VocabParallelEmbedding)]
    embeddings = {id(m.weight) for m in layers if not isinstance(m, ParallelLMHead)}
    for head in layers:
        if isinstance(head, ParallelLMHead) and id(head.weight) in embeddings:
            head.quant_method.process_weights_after_loading(head)


def capture_routes() -> None:
    """Let the CPU kernels report the experts they choose to the router of their layer. Idempotent.

    Two functions are wrapped: the layer's forward notes whose router is at work, and `select_experts` hands its ids
    `[tokens, topk]` to the capture function that vLLM's own recorder put on that router. No number changes.
    """
    from vllm.model_executor.layers.fused_moe import cpu_fused_moe
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    if getattr(cpu_fused_moe.select_experts, "reports_routes", False):
        return
    at_work: list[BaseRouter] = []
    apply_layer, select_experts = MoERunner._apply_quant_method, cpu_fused_moe.select_experts

    @functools.wraps(apply_layer)
    def apply_and_note_router(self: MoERunner, *args: Any, **kwargs: Any) -> Any:
        at_work.append(self.router)
        try:
            return apply_layer(self, *args, **kwargs)
        finally:
            at_work.pop()

    @functools.wraps(select_experts)
    def select_and_report(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = select_experts(*args, **kwargs)
        capture = at_work[-1].capture_fn if at_work else None
        if capture is not None:
            capture(ids)
        return weights, ids

    select_and_report.reports_routes = True  # type: ignore[attr-defined]
    MoERunner._apply_quant_method = apply_and_note_router
    cpu_fused_moe.select_experts = select_and_report
