"""A run's configuration as the planner's layout, workload and engines, what of it the planner does not know, and the
way back: the configuration that runs a plan."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from megatron_dppo.config.schema import Config
from megatron_dppo.errors import UserError
from megatron_dppo.models.hf_config import HFConfig
from megatron_dppo.planner.engine import EngineSettings
from megatron_dppo.planner.gpus import GIB, Gpu
from megatron_dppo.planner.plan import Plan, Run
from megatron_dppo.planner.workload import EXPERT_IMBALANCE, Layout, Workload


def engine_gpus(config: Config) -> int:
    """GPUs of the fleet's engines; 0 where they share the trainer's."""
    rollout = config.rollout
    return 0 if rollout.placement == "colocated" else rollout.engines * rollout.tensor_parallel


def planned_run(
    config: Config,
    model: HFConfig,
    gpu: Gpu,
    gpus: int,
    *,
    mean_response: int | None = None,
    expert_imbalance: float = EXPERT_IMBALANCE,
) -> Run:
    """The run of `config` on `gpus` GPUs, engines' included. The rules of `preflight` are kept.

    mean_response  tokens of an average answer, which no configuration knows; all that fit when absent

    Raises UserError where the GPUs cannot be divided between ranks and engines.
    """
    rollout, trainer, parallel = config.rollout, config.trainer, config.parallel

    # Whose the GPUs are.
    engines = engine_gpus(config)
    if gpus <= engines:
        raise UserError(
            f"{gpus} GPUs: rollout.placement=fleet takes {engines} for engines (rollout.engines={rollout.engines} of "
            f"rollout.tensor_parallel={rollout.tensor_parallel} GPUs) and leaves none to train; use more GPUs, fewer "
            "engines, or rollout.placement=colocated"
        )
    tensor = rollout.tensor_parallel
    if not engines and tensor > gpu.gpus_per_node:
        raise UserError(
            f"rollout.placement=colocated: an engine of rollout.tensor_parallel={tensor} GPUs has to fit on a node of "
            f"{gpu.gpus_per_node}; lower it"
        )

    # What a step has to do.
    mean = rollout.max_response_tokens if mean_response is None else mean_response
    if not 0 < mean <= rollout.max_response_tokens:
        raise UserError(
            f"--mean-response {mean}: must be from 1 to {rollout.max_response_tokens} (rollout.max_response_tokens)"
        )
    workload = Workload(
        sequences=trainer.prompts_per_step * trainer.samples_per_prompt,
        mini_batches=trainer.prompts_per_step // trainer.prompts_per_mini_batch,
        prompt_tokens=rollout.max_prompt_tokens,
        response_tokens=rollout.max_response_tokens,
        mean_response_tokens=mean,
        topk=rollout.top_k_logprobs,
        ppo_epochs=trainer.ppo_epochs,
        routes=rollout.router_replay,
    )

    # The trainer, and an engine.
    budget = config.actor.max_tokens_per_microbatch
    longest = parallel.packed_length(workload.sequence)
    layout = Layout(
        model=model,
        gpu=gpu,
        gpus=gpus - engines,
        parallel=parallel,
        recompute=config.actor.recompute,
        recompute_layers=config.actor.recompute_layers,
        microbatch_tokens=max(budget, longest) if config.actor.long_sequences == "alone" else budget,
        attention_span=workload.mean_sequence,
        expert_imbalance=expert_imbalance,
        lora=config.lora,
        reduced_bytes=2 if config.optimizer.grad_reduce_dtype == "bfloat16" else 4,
        optimizer_offload=config.optimizer.cpu_offload_fraction,
    )
    settings = EngineSettings(
        tensor=tensor,
        utilization=rollout.gpu_memory_utilization,
        kv_cache=None if rollout.kv_cache_mib is None else rollout.kv_cache_mib << 20,
        max_sequences=rollout.max_num_seqs,
        element=4 if rollout.dtype == "float32" else 2,
        quantized=rollout.quantization != "none",
        cache_element=1 if rollout.kv_cache_dtype == "fp8" else None,
        bucket=rollout.weight_sync_bucket_mib << 20,
        shares=rollout.weight_shares("cuda") > 1,
        expert_parallel=rollout.expert_parallel,
        sleeps=rollout.enable_sleep,
        kept=int(config.optimizer.keep_on_gpu_gib * GIB),
    )
    return Run(layout, workload, settings, engines)


def beside_figures(config: Config, plan: Plan) -> tuple[str, ...]:
    """Settings that the figures do not follow, a line each: what is missing, and which way that errs."""
    return tuple(_memory(config, plan)) + tuple(_time(config, plan))


def _memory(config: Config, plan: Plan) -> Iterator[str]:
    actor, rollout = config.actor, config.rollout
    if actor.dtype == "float32":
        yield "actor.dtype=float32: planned as bfloat16; weights and activations take twice as much"
    if plan.layout.model.moe and actor.token_dispatcher == "allgather":
        yield "actor.token_dispatcher=allgather: planned as alltoall; every rank then holds the rows of all"
    if actor.load_balancing_loss or actor.router_z_loss:
        yield "actor.load_balancing_loss and router_z_loss: what the router keeps for them"
    if config.algorithm.reference_kl is not None and config.lora is None:
        kept = max(stage.weights for stage in plan.stages) / GIB
        yield f"algorithm.reference_kl: {kept:.1f} GiB of the host for each training GPU, the reference's weights"
    if rollout.max_num_batched_tokens > 8192:
        yield (
            f"rollout.max_num_batched_tokens={rollout.max_num_batched_tokens}: the engines' workspace is that of 8192"
        )
    if actor.long_sequences == "alone" and plan.workload.sequence > actor.max_tokens_per_microbatch:
        yield (
            f"actor.long_sequences=alone: every pack is planned as {plan.layout.microbatch_tokens} tokens, as much as "
            "the longest sequence"
        )
    held = plan.traffic.rollouts * (1 if rollout.schedule == "synchronous" else rollout.max_staleness + 1)
    if held > rollout.object_store_mib << 20:
        yield (
            f"rollout.object_store_mib={rollout.object_store_mib}: rollouts take up to {held / GIB:.1f} GiB on all "
            "hosts together; of a Ray that the run starts, what finds no room goes to disk, which takes time"
        )


def _time(config: Config, plan: Plan) -> Iterator[str]:
    rollout, optimizer = config.rollout, config.optimizer
    if optimizer.cpu_offload_fraction:
        yield "optimizer.cpu_offload_fraction: the time of AdamW on the host; the step takes longer"
    if optimizer.overlap_grad_reduce:
        yield "optimizer.overlap_grad_reduce and overlap_param_gather: planned without overlap; the step is shorter"
    if config.algorithm.resolve().needs_recomputed_logp:
        yield f"algorithm.preset={config.algorithm.preset}: the forward pass of its recomputed anchor; more time"
    if config.algorithm.reference_kl is not None:
        yield "algorithm.reference_kl: the reference's forward pass and, without adapters, the exchange of weights"
    if rollout.schedule != "synchronous":
        overlap = "rollout and training are added, though they overlap; the step is shorter"
        yield f"rollout.schedule={rollout.schedule}: {overlap}"
    if rollout.quantization != "none":
        yield f"rollout.quantization={rollout.quantization}: products at bfloat16's rate; generation may be shorter"
    if rollout.oversample:
        yield f"rollout.oversample={rollout.oversample:g}: the prompts that are sampled and dropped; more time"
    for name, options in (("actor.megatron", config.actor.megatron), ("rollout.vllm", rollout.vllm)):
        if options:
            yield f"{name}={options}: planned without; what it changes of memory and time is not in the figures"
    if rollout.engine != "vllm":
        yield f"rollout.engine={rollout.engine}: planned as vLLM, in memory and time, which it is not"
    if rollout.dynamic_sampling:
        yield f"rollout.dynamic_sampling={rollout.dynamic_sampling}: the groups that are sampled and dropped; more time"
    if rollout.enforce_eager:
        yield "rollout.enforce_eager=true: planned with CUDA graphs; generation takes longer"
    if plan.layout.model.moe is None or not rollout.router_replay:
        yield "rollout without routes: planned with the host's time per token that recording them takes; it is shorter"
    if config.task.kind in ("environment", "agent"):
        yield f"task.kind={config.task.kind}: an episode counts as one answer; several turns take longer"
    if config.evaluation.every or config.trainer.checkpoint_every:
        yield "evaluation and checkpoints: time beside the steps"


LORA_LEARNING_RATE = 1e-5
"""The paper's for adapters (Table 1); the default is for all weights."""


def recommended_config(plan: Plan, model_path: Path, *, prompts_per_step: int) -> str:
    """YAML of the plan, checked against the schema. Keys that are absent keep their defaults."""
    workload, layout, engine = plan.workload, plan.layout, plan.engine
    name = Path(os.path.abspath(model_path)).name  # of a link its own
    parallel = {k: v for k, v in layout.parallel.model_dump().items() if v is True or (v and v != 1)}
    tree: dict[str, Any] = {
        "run": {"dir": f"runs/{name}", "name": name},
        "model": {"path": str(model_path)},
        "parallel": parallel,
        "actor": {
            "dtype": "bfloat16",
            "max_tokens_per_microbatch": layout.microbatch_tokens,
            "recompute": layout.recompute,
            **({"recompute_layers": layout.recompute_layers} if layout.recompute_layers else {}),
        },
        "rollout": {
            "max_prompt_tokens": workload.prompt_tokens,
            "max_response_tokens": workload.response_tokens,
            **({"top_k_logprobs": workload.topk} if workload.topk else {}),
            "tensor_parallel": engine.tensor,
            "gpu_memory_utilization": plan.settings.utilization,
            "placement": "fleet" if plan.rollout_gpus else "colocated",
            "enable_sleep": not plan.rollout_gpus,
            "object_store_mib": max(512, -(-plan.traffic.rollouts // (1 << 20) * 5 // 4)),
        },
        "trainer": {
            "prompts_per_step": prompts_per_step,
            "samples_per_prompt": workload.sequences // prompts_per_step,
            "prompts_per_mini_batch": prompts_per_step // workload.mini_batches,
            "checkpoint_every": 10,
        },
    }
    if plan.rollout_gpus:
        tree["rollout"]["engines"] = engine.engines
    if layout.lora is not None:
        tree["lora"] = {"rank": layout.lora.rank, "targets": list(layout.lora.targets)}
        tree["optimizer"] = {"lr": LORA_LEARNING_RATE}
    if workload.ppo_epochs > 1:
        tree["trainer"]["ppo_epochs"] = workload.ppo_epochs
    if layout.model.moe is None:
        tree["actor"]["router_replay"] = "none"
    Config.model_validate(tree)
    return yaml.safe_dump({k: v for k, v in tree.items() if v}, sort_keys=False)
