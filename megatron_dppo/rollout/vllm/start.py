"""Starting vLLM: the options of its AsyncLLM, and what is refused of the engine that they make."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Coroutine
from dataclasses import fields
from importlib.metadata import entry_points
from typing import Any

from megatron_dppo.compat.vllm_cpu import engine_environment, engine_options, on_cpu
from megatron_dppo.errors import UserError
from megatron_dppo.launch.imports import uncollected
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.engine import EngineDead
from megatron_dppo.rollout.event_loop import EventLoop
from megatron_dppo.rollout.model_facts import ModelFacts
from megatron_dppo.rollout.vllm.core import VllmCore
from megatron_dppo.rollout.vllm.route_requirements import check_engine, check_version
from megatron_dppo.rollout.vllm.sampling import refuse_engine_defaults

BACKEND = "megatron_dppo"
"""Our name to vLLM, as a plugin and as a weight-transfer backend."""


class CoreLoop(EventLoop):
    """Where the coroutines of vLLM's client run. Raises `EngineDead` where vLLM's core is gone."""

    def run[T](self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        try:
            return super().run(coroutine, timeout)
        except Exception as error:
            if type(error).__name__ == "EngineDeadError":  # by name: whoever unpickles ours needs no vLLM
                raise EngineDead(str(error)) from None
            raise


def shorten_socket_paths() -> None:
    """vLLM's sockets are `FOLDER/UUID` in the temporary folder, and a socket's path has at most 107 bytes: where that
    is too long they go to /tmp, unless VLLM_RPC_BASE_PATH says where. To be called before an engine starts."""
    if len(os.fsencode(tempfile.gettempdir())) + len("/") + 36 > 107:
        os.environ.setdefault("VLLM_RPC_BASE_PATH", "/tmp")


def check_plugin() -> None:
    """UserError where vLLM's processes would not load this package's plugin (`compat/vllm_plugin.py`)."""
    if BACKEND not in entry_points(group="vllm.general_plugins").names:
        raise UserError(
            f"{sys.executable} has no installed megatron_dppo, which vLLM's processes load as a plugin: that it can be "
            "imported is not enough; run `pip install --no-deps -e .` in its folder"
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and BACKEND not in allowed.split(","):
        raise UserError(
            f"VLLM_PLUGINS={allowed} leaves out {BACKEND}, which brings weights to vLLM; add it, or unset the variable"
        )


async def start_vllm(facts: ModelFacts, config: RolloutConfig) -> VllmCore:
    """An AsyncLLM whose core runs in a process of its own. Raises `UserError` for what routes or the model's own
    distribution cannot be recorded with."""
    check_plugin()
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # before vLLM is imported
    os.environ.setdefault("VLLM_ENGINE_READY_TIMEOUT_S", str(int(config.start_timeout_s)))
    shorten_socket_paths()
    with uncollected():
        os.environ.update(engine_environment(config))
        import vllm
        from vllm import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

    if facts.routes is not None:
        check_version(vllm.__version__, {field.name for field in fields(AsyncEngineArgs)})
    options: dict[str, Any] = {
        "model": str(facts.folder),
        "dtype": config.dtype,
        "config_format": "hf",  # whatever lies beside config.json
        "load_format": config.load_format,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "kv_cache_memory_bytes": None if config.kv_cache_mib is None else config.kv_cache_mib << 20,
        "tensor_parallel_size": config.tensor_parallel,
        "enable_expert_parallel": config.expert_parallel,
        "enforce_eager": config.enforce_eager,
        "enable_prefix_caching": config.enable_prefix_caching,
        "enable_sleep_mode": config.enable_sleep,
        "enable_return_routed_experts": facts.routes is not None,
        "scheduler_cls": "megatron_dppo.rollout.vllm.record_scheduler.record_scheduler",
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,
        "generation_config": "vllm",
        "skip_tokenizer_init": True,
        "weight_transfer_config": {"backend": BACKEND},
        "worker_extension_cls": "megatron_dppo.rollout.vllm.receiver.ReportsWeights",
        "disable_log_stats": True,
    }
    arguments = AsyncEngineArgs(**(options | engine_options(config)))
    vllm_config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
    if facts.routes is not None:
        check_engine(vllm_config, facts.routes)
    engine = AsyncLLM.from_vllm_config(vllm_config, disable_log_stats=True)
    refuse_engine_defaults(
        engine.model_config.get_diff_sampling_param(),
        [entry.value for entry in entry_points(group="vllm.logits_processors")],
    )
    return VllmCore(engine, facts.routes)


def register_backend() -> None:
    """Name `BucketReceiver` to vLLM's factory. Idempotent; the class is imported when vLLM asks for it."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    try:
        WeightTransferEngineFactory.register_engine(BACKEND, "megatron_dppo.rollout.vllm.receiver", "BucketReceiver")
    except ValueError:  # the factory knows the name already
        return


def check_expert_parallel(facts: ModelFacts, config: RolloutConfig) -> None:
    """Raise `UserError` where `rollout.expert_parallel` does not fit the model."""
    if not config.expert_parallel:
        return
    where = f"rollout.expert_parallel=true: {facts.folder}"
    if facts.experts == 0:
        raise UserError(f"{where} has no experts; set it to false")
    workers = config.tensor_parallel
    if facts.experts < workers:
        raise UserError(
            f"{where} has {facts.experts} experts, fewer than rollout.tensor_parallel={workers}; lower the latter"
        )
    if on_cpu() and facts.experts // workers < facts.experts_per_token:
        raise UserError(
            f"{where} runs {facts.experts_per_token} experts a token, and on a CPU each of rollout.tensor_parallel="
            f"{workers} workers must have that many of the {facts.experts}; lower the latter"
        )
