"""The `vllm.general_plugins` entry point: vLLM calls it in every process that it starts."""

from __future__ import annotations


def register() -> None:
    """Prepare this vLLM process for our rollout engine. Idempotent, since vLLM may call it again.

    Names our weight-transfer backend, and on a CPU lets router replay see the experts that the kernels choose; on a
    GPU vLLM does that itself.
    """
    from megatron_dppo.compat.vllm_cpu import capture_routes, on_cpu
    from megatron_dppo.rollout.weight_transfer.backend import register_backend

    register_backend()
    if on_cpu():
        capture_routes()
