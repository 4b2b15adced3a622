"""The configuration that runs a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from megatron_dppo.config.schema import Config
from megatron_dppo.planner.plan import Plan

LORA_LEARNING_RATE = 1e-5
"""The paper's for adapters (Table 1); the default is for all weights."""


def recommended_config(plan: Plan, model_path: Path, *, prompts_per_step: int) -> str:
    """YAML of the plan, checked against the schema. Keys that are absent keep their defaults."""
    workload, layout, engine = plan.workload, plan.layout, plan.engine
    parallel = {k: v for k, v in layout.parallel.model_dump().items() if v is True or (v and v != 1)}
    tree: dict[str, Any] = {
        "run": {"dir": f"runs/{model_path.name}", "name": model_path.name},
        "model": {"path": str(model_path)},
        "parallel": parallel,
        "actor": {
            "dtype": "bfloat16",
            "max_tokens_per_microbatch": layout.microbatch_tokens,
            "recompute": layout.recompute,
        },
        "rollout": {
            "max_prompt_tokens": workload.prompt_tokens,
            "max_response_tokens": workload.response_tokens,
            "top_k_logprobs": workload.topk,
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
        tree["actor"]["router_replay"], tree["rollout"]["router_replay"] = "none", False
    Config.model_validate(tree)
    return yaml.safe_dump({k: v for k, v in tree.items() if v}, sort_keys=False)
