"""Naming our weight-transfer backend to vLLM."""

from __future__ import annotations

BACKEND = "megatron_dppo"


def register_backend() -> None:
    """Name `BucketReceiver` to vLLM's factory. Idempotent; the class is imported when vLLM asks for it."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    try:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "megatron_dppo.rollout.weight_transfer.receiver", "BucketReceiver"
        )
    except ValueError:  # the factory knows the name already
        return
