"""`rollout.vllm`: which options of vLLM's engine may be set beside the settings that are here. Imports no vLLM."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from megatron_dppo.errors import UserError, did_you_mean

_SETTINGS = {
    "model": "model.path",
    "seed": "run.seed",
    "max_model_len": "rollout.max_prompt_tokens and rollout.max_response_tokens",
    "kv_cache_memory_bytes": "rollout.kv_cache_mib",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "enable_expert_parallel": "rollout.expert_parallel",
    "enable_sleep_mode": "rollout.enable_sleep",
    "enable_return_routed_experts": "actor.router_replay",
    "max_logprobs": "rollout.top_k_logprobs",
    "quantization_config": "rollout.quantization",
    **{name: f"rollout.{name}" for name in ("dtype", "load_format", "max_num_seqs", "max_num_batched_tokens")},
    **{name: f"rollout.{name}" for name in ("gpu_memory_utilization", "enforce_eager", "enable_prefix_caching")},
    **{name: f"rollout.{name}" for name in ("quantization", "kv_cache_dtype")},
}
"""What a setting of this package decides."""
_REFUSED = (
    (
        r"(pipeline_parallel|prefill_context_parallel|decode_context_parallel|data_parallel_|dcp_|cp_kv_|_api_).*"
        r"|nnodes|node_rank|master_(addr|port)|device_ids|distributed_executor_backend|enable_elastic_ep",
        "an engine here is rollout.tensor_parallel GPUs of one node",
    ),
    (
        r"(logprobs_mode|(override_)?generation_config|logits_processors|reasoning_|diffusion_).*",
        "tokens are drawn from the model's own distribution, of which log mu is recorded",
    ),
    (r"(speculative_|spec_).*", "drafted tokens come with no routes and other log-probabilities"),
    (
        r"hf_(config_path|overrides)|model_(class_overrides|impl|weights)|(code_|tokenizer_)?revision|config_format|runner"
        r"|convert|trust_remote_code|pooler_config|override_attention_dtype|(enable_lora|max_lora|max_cpu_lora).*|lora_.*",
        "the engine has the model that is trained, as model.path describes it",
    ),
    (
        r"(enable_eplb|eplb_config|expert_placement_strategy|enable_ep_weight_filter)",
        "a weight sync brings each expert to the GPU that vLLM puts it on at first, in order",
    ),
    (
        r"(kv_transfer_|ec_transfer_|kv_offloading_).*",
        "key-value blocks from elsewhere outlive the weights they are of",
    ),
    (r"(cpu_offload_|offload_).*", "a weight sync writes weights on the GPU, and would miss those on the host"),
    (
        r"scheduler_cls|worker_(cls|extension_cls)|weight_transfer_config|additional_config|language_model_only"
        r"|disable_log_stats|(skip_)?tokenizer.*|tokens_only|block_size|enable_chunked_prefill|gdn_prefill_backend",
        "what is recorded, and weight syncs, rest on how it is set here",
    ),
    (
        r"mamba_(ssm_)?cache_(dtype|philox_rounds)|enable_mamba_cache_stochastic_rounding",
        "states that are rounded after every token drift from what is trained",
    ),
    (r"calculate_kv_scales", "vLLM takes the scales from the first weights it has, and keeps them for all later ones"),
    (r"hf_token", "it would be written into config.yaml; set HF_TOKEN in the environment"),
)
"""Names of others, as patterns, and why they are refused. What routes alone cannot be recorded with is refused when the
engine's configuration is made (`vllm.start.check_engine`)."""


def check_options(names: Iterable[str]) -> None:
    """UserError for an option that a setting decides, that an engine of a training run cannot have, or that the
    installed vLLM does not know."""
    for name in names:
        if name in _SETTINGS:
            raise UserError(f"rollout.vllm.{name}: {_SETTINGS[name]} decides it; set that")
        for pattern, why in _REFUSED:
            if re.fullmatch(pattern, name):
                raise UserError(f"rollout.vllm.{name} is not taken: {why}; remove it")
        if (known := _known()) and name not in known:
            hint = did_you_mean(name, known) or "; `vllm serve --help=all` lists them, with _ in place of -"
            raise UserError(f"rollout.vllm.{name}: vLLM has no such option{hint}")


@cache
def _known() -> frozenset[str]:
    """Fields of `AsyncEngineArgs`, read from vLLM's source, which takes ten seconds to import; empty where there is no
    vLLM."""
    found = find_spec("vllm")
    if found is None or found.origin is None:
        return frozenset()
    tree = ast.parse((Path(found.origin).parent / "engine" / "arg_utils.py").read_text(encoding="utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.endswith("EngineArgs")]
    fields = [field for node in classes for field in node.body if isinstance(field, ast.AnnAssign)]
    return frozenset(field.target.id for field in fields if isinstance(field.target, ast.Name))
