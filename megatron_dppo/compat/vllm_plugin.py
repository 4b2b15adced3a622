"""The `vllm.general_plugins` entry point: vLLM calls it in every process that it starts."""

from __future__ import annotations

import atexit
import gc
from contextlib import suppress

BACKEND = "megatron_dppo"
"""Our name to vLLM, as a plugin and as a weight-transfer backend."""
_RECEIVER = "megatron_dppo.rollout.vllm.receiver", "BucketReceiver"
"""Imported when vLLM asks for it."""


def register() -> None:
    """Prepare this vLLM process for our rollout engine. Idempotent, since vLLM may call it again.

    Names our weight-transfer backend, lets torch's store listen on one address, and on a CPU lets router replay see the
    experts that the kernels choose, and workers share them out; on a GPU vLLM does that itself.

    A process that has imported vLLM walks 700,000 objects in its last garbage collection: two to five seconds in which
    the engine's core, its work done, is waited for and then killed. Frozen objects are not walked.
    """
    atexit.register(gc.freeze)
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from megatron_dppo.compat.torch_store import bind_stores
    from megatron_dppo.compat.vllm_cpu import mend_expert_choice, on_cpu

    with suppress(ValueError):  # the factory knows the name already
        WeightTransferEngineFactory.register_engine(BACKEND, *_RECEIVER)
    bind_stores()
    if on_cpu():
        mend_expert_choice()
