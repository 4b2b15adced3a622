"""Starting vLLM: the options of its AsyncLLM, and what is refused of the engine that they make."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from collections.abc import Coroutine
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from megatron_dppo.compat.vllm_cpu import on_cpu
from megatron_dppo.compat.vllm_plugin import BACKEND
from megatron_dppo.errors import UserError, listed
from megatron_dppo.json_object import read_json_object
from megatron_dppo.launch.imports import uncollected
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.engine import EngineDead
from megatron_dppo.rollout.event_loop import EventLoop
from megatron_dppo.rollout.model_facts import ModelFacts, check_expert_parallel
from megatron_dppo.rollout.serving.engine import ServedEngine
from megatron_dppo.rollout.vllm.core import VllmCore
from megatron_dppo.rollout.vllm.sampling import refuse_engine_defaults
from megatron_dppo.rollout.vllm.warm_up import keep_compiled, warm_up
from megatron_dppo.router_replay.record import RouteSchema


def check_engine(vllm_config: Any, schema: RouteSchema) -> None:
    """Raise `UserError` with the first reason why an engine's routes could not be replayed. What no engine may have,
    with routes or without, `vllm_options` refuses by name.

    vllm_config   of the engine as it was built
    schema        layer pattern, experts and top-k that the trainer's model has
    """
    if vllm_config.parallel_config.use_ubatching:
        raise UserError(
            "rollout.router_replay cannot work with vLLM's dual-batch overlap: the halves of a split batch write their "
            "routes over each other; switch it off"
        )
    if not vllm_config.model_config.enable_return_routed_experts:
        raise UserError("rollout.router_replay is on, but the engine was started without enable_return_routed_experts")
    model = vllm_config.model_config.hf_text_config
    held = {
        "experts": (vllm_config.model_config.get_num_experts(), schema.num_experts),
        "experts per token": (model.num_experts_per_tok, schema.topk),
        "layers": (model.num_hidden_layers, schema.hidden_layers),
    }
    for what, (engine, trainer) in held.items():
        if engine != trainer:
            raise UserError(
                f"the engine's model has {engine} {what}, the trainer's {trainer}: routes of one mean nothing to the "
                "other; both must load the same model.path"
            )


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


_KV_CACHE_MIB = 256
"""Enough for tens of thousands of tokens of the models one runs on a CPU, and touched in well under a second."""


def engine_environment(config: RolloutConfig) -> dict[str, str]:
    """Variables that the engine's processes need before they import torch; empty on a GPU."""
    if not on_cpu():
        return {}
    environment = {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": str(config.cpu_threads), "VLLM_MLA_DISABLE": "1"}
    if config.tensor_parallel > 1:  # it wants a NUMA node for each worker, to bind its threads to
        environment["VLLM_CPU_OMP_THREADS_BIND"] = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return environment


def engine_options(config: RolloutConfig) -> dict[str, Any]:
    """Arguments of `AsyncEngineArgs` that the machine needs on top of the common ones. Of vLLM 0.26 on a CPU:

    - the CPU platform replaces the in-core executor by a third process unless the executor is named by its class path;
    - a request with a seed of its own whose prompt is prefilled in chunks ends the engine: the runner rewinds the
      random generator after a chunk, and torch's CPU generators cannot be rewound;
    - without a stated size the KV cache takes most of the machine's memory.
    """
    if not on_cpu():
        # vLLM takes FlashInfer's kernel for gated delta layers on Hopper without asking whether it is installed.
        return {} if importlib.util.find_spec("flashinfer") else {"gdn_prefill_backend": "triton"}
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


def quantization_options(config: RolloutConfig) -> dict[str, Any]:
    """Arguments of `AsyncEngineArgs`: block-wise FP8 for all linear layers and experts but the routers, which vLLM
    would quantise in some families (`wrongly_quantised` looks at the model that comes of it)."""
    options: dict[str, Any] = {"kv_cache_dtype": config.kv_cache_dtype}
    if config.quantization == "fp8":
        ignored = {"ignore": [r"re:.*\.(gate|router|shared_expert_gate)$"]}
        options |= {"quantization": "fp8_per_block", "quantization_config": ignored}
    return options


def check_quantization(config: RolloutConfig) -> None:
    """Raise `UserError` on a CPU for what is to be quantised: vLLM has weight-only kernels for some processors there,
    and none of its attention."""
    for name, plain in (("quantization", "none"), ("kv_cache_dtype", "auto")):
        value = getattr(config, name)
        if value != plain and on_cpu():
            raise UserError(f"rollout.{name}={value} needs engines on GPUs, and here is none; set it to {plain}")


def common_options(facts: ModelFacts, config: RolloutConfig) -> dict[str, Any]:
    """Arguments of `AsyncEngineArgs` that this package decides. Imports vLLM."""
    from megatron_dppo.rollout.vllm.layers import LATENT_NORM_EPS

    delta, latent = facts.model and facts.model.delta, facts.model and facts.model.latent
    return {
        "model": str(facts.folder),
        "dtype": config.dtype,
        "config_format": "hf",  # whatever lies beside config.json
        # Rounded to bfloat16, logits of 16 to 32 are off by up to 1/16, and the trainer's are float32. Heads of
        # quantized checkpoints and of models of no family, which are evaluated alone, do without. What config.json says
        # of it does not count.
        "hf_overrides": {"head_dtype": "float32"} if facts.model else {},
        "load_format": config.load_format,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "kv_cache_memory_bytes": None if config.kv_cache_mib is None else config.kv_cache_mib << 20,
        "tensor_parallel_size": config.tensor_parallel,
        "enable_expert_parallel": config.expert_parallel,
        "enforce_eager": config.enforce_eager,
        "enable_prefix_caching": config.enable_prefix_caching and not delta,
        "enable_sleep_mode": config.enable_sleep,
        "enable_return_routed_experts": facts.routes is not None,
        "scheduler_cls": "megatron_dppo.rollout.vllm.record_scheduler.record_scheduler",
        "language_model_only": True,  # a model that sees images too is asked about text alone
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,
        "generation_config": "vllm",
        "skip_tokenizer_init": True,
        "weight_transfer_config": {"backend": BACKEND},
        # Of a delta rule: rounded to half precision after every token it would drift from what is trained
        "mamba_ssm_cache_dtype": "float32" if delta else "auto",
        "additional_config": {LATENT_NORM_EPS: latent.norm_eps} if latent else {},
        "worker_extension_cls": "megatron_dppo.rollout.vllm.receiver.ReportsWeights",
        "disable_log_stats": True,
    }


async def start_vllm(facts: ModelFacts, config: RolloutConfig) -> VllmCore:
    """An AsyncLLM whose core runs in a process of its own. Raises `UserError` for what routes or the model's own
    distribution cannot be recorded with."""
    # What vLLM reads from the environment when it is imported.
    check_plugin()
    keep_compiled(config.compile_cache)
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # before vLLM is imported
    os.environ.setdefault("VLLM_ENGINE_READY_TIMEOUT_S", str(int(config.start_timeout_s)))
    shorten_socket_paths()
    with uncollected():
        os.environ.update(engine_environment(config))
        if not on_cpu():  # a fork of a process that counted the GPUs cannot use them, and vLLM does not see that
            os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        import vllm
        from vllm import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

    if config.quantization == "fp8" and current_platform.is_device_capability(90):
        # Activations' scales as powers of two are what DeepGEMM needs on Blackwell; on Hopper they only cost precision.
        os.environ.setdefault("VLLM_USE_DEEP_GEMM_E8M0", "0")
    # What of the engine that its options make is refused before it starts.
    options = common_options(facts, config) | quantization_options(config) | engine_options(config) | config.vllm
    try:
        vllm_config = AsyncEngineArgs(**options).create_engine_config(UsageContext.ENGINE_CONTEXT)
    except (ValueError, TypeError, NotImplementedError) as error:
        named = read_json_object(facts.folder / "config.json").get("architectures") or ()
        if not set(named).isdisjoint(vllm.ModelRegistry.get_supported_archs()):
            problem = " ".join(str(error).split())[:300]
            if config.vllm:
                raise UserError(
                    f"rollout.vllm={config.vllm}: vLLM refuses it: {problem}; change or remove it"
                ) from error
            if isinstance(error, ValueError):  # what it says of settings; checked here only of models of a family
                raise UserError(
                    f"{facts.folder}: vLLM refuses to run it under these settings of rollout: {problem}; change what "
                    "it names"
                ) from error
            raise
        raise UserError(
            f"{facts.folder}: vLLM {vllm.__version__} has no {', '.join(named) or 'such model'}; set "
            "rollout.engine=reference, or install a plugin of vLLM that brings it"
        ) from error
    if facts.routes is not None:
        check_engine(vllm_config, facts.routes)
    engine = AsyncLLM.from_vllm_config(vllm_config, disable_log_stats=True)
    refuse_engine_defaults(
        engine.model_config.get_diff_sampling_param(),
        [entry.value for entry in entry_points(group="vllm.logits_processors")],
    )
    if config.quantization == "fp8":
        for wrong in await engine.collective_rpc("wrongly_quantised"):
            if wrong:
                raise UserError(
                    f"rollout.quantization=fp8: {facts.folder}: {listed(wrong, 4, between='; ')}; set it to none"
                )
    core = VllmCore(engine, facts.routes)
    if config.compile_cache is not None and not on_cpu():  # where nothing is compiled
        await warm_up(core, facts, config)
    return core


def check_cpu_workers(facts: ModelFacts, config: RolloutConfig) -> None:
    """Raise `UserError` where a worker would have fewer experts than a token chooses, which the CPU's kernels do not
    take."""
    workers, moe = config.tensor_parallel, facts.model and facts.model.moe
    if config.expert_parallel and on_cpu() and moe and moe.experts // workers < moe.topk:
        raise UserError(
            f"rollout.expert_parallel=true: {facts.folder} runs {moe.topk} experts a token, and on a "
            f"CPU each of rollout.tensor_parallel={workers} workers must have that many of the {moe.experts}; lower "
            "the latter"
        )


def check_layers(facts: ModelFacts) -> None:
    """Raise `UserError` where vLLM would end at the first token: on a CPU its gated delta rule asserts bfloat16 and
    then fails in decoding, and its attention takes sinks in bfloat16 alone, which would round them."""
    if on_cpu() and facts.model and (facts.model.delta or facts.model.sinks):
        layers = "the gated delta layers" if facts.model.delta else "the attention sinks"
        raise UserError(
            f"rollout.engine=vllm: on a CPU vLLM cannot decode with {layers} of {facts.folder}; set "
            "rollout.engine=reference"
        )


def open_engine(model: Path, config: RolloutConfig) -> ServedEngine[VllmCore]:
    """vLLM on this machine, its processes below this one. Blocks until it can generate."""
    check_quantization(config)
    facts = ModelFacts.read(Path(model), router_replay=config.router_replay)
    check_expert_parallel(facts, config)
    check_cpu_workers(facts, config)
    check_layers(facts)
    return ServedEngine(facts, config, CoreLoop("vllm-engine"), partial(start_vllm, facts, config))
