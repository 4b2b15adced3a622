from __future__ import annotations

import pytest
from pydantic import ValidationError

from megatron_dppo.rollout.config import RolloutConfig


def test_every_field_says_what_it_means() -> None:
    undocumented = [name for name, field in RolloutConfig.model_fields.items() if not field.description]
    assert undocumented == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "rollout.max_num_batched_tokens=32 cannot hold"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": 0.005}, "silently raises temperatures below 0.01"),
        ({"stop_token_ids": (5, -1)}, "negative token id"),
        (
            {"schedule": "one_step_off", "placement": "colocated", "enable_sleep": True},
            "set rollout.enable_sleep=false",
        ),
        ({"max_staleness": 2}, "needs rollout.schedule=one_step_off or window"),
        ({"partial_rollouts": True}, "needs rollout.schedule=one_step_off or window"),
        ({"schedule": "window", "partial_rollouts": True}, "rollout.max_staleness to 2 or more"),
        ({"schedule": "window", "max_staleness": 2}, "set rollout.partial_rollouts=true"),
        ({"expert_parallel": True}, "rollout.tensor_parallel=1 gives it a single one"),
        ({"quantization": "fp8", "dtype": "float32"}, "quantises bfloat16 and float16 only"),
        ({"top_p": 0.9}, "top_p"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"gpu_memory_utilization": 1.2}, "gpu_memory_utilization"),
        ({"object_store_mib": 8}, "object_store_mib"),
        ({"dtype": "float64"}, "dtype"),
        (
            {"vllm": {"atention_backend": "x"}},
            r"vllm.atention_backend: vLLM has no such .* did you mean attention_backend",
        ),
        (
            {"vllm": {"tensor_parallel_size": 2}},
            "vllm.tensor_parallel_size: rollout.tensor_parallel decides it; set that",
        ),
        (
            {"vllm": {"pipeline_parallel_size": 2}},
            "is not taken: an engine here is rollout.tensor_parallel GPUs of one",
        ),
        ({"vllm": {"decode_context_parallel_size": 2}}, "is rollout.tensor_parallel GPUs of one"),
        ({"vllm": {"prefill_context_parallel_size": 2}}, "is rollout.tensor_parallel GPUs of one"),
        ({"vllm": {"enable_eplb": True}}, "vllm.enable_eplb is not taken: a weight sync brings each expert"),
        ({"vllm": {"speculative_config": {"method": "mtp"}}}, "drafted tokens come with no routes"),
        ({"vllm": {"kv_transfer_config": {}}}, "outlive the weights they are of"),
        ({"vllm": {"kv_offloading_size": 4}}, "outlive the weights they are of"),
        ({"vllm": {"calculate_kv_scales": True}}, "from the first weights it has"),
        ({"vllm": {"hf_token": "x"}}, "set HF_TOKEN in the environment"),
        ({"vllm": {"mamba_cache_dtype": "bfloat16"}}, "drift from what is trained"),
        ({"vllm": {"enable_mamba_cache_stochastic_rounding": True}}, "drift from what is trained"),
        (
            {"vllm": {"async_scheduling": True}, "engine": "reference"},
            "rollout.vllm is for rollout.engine=vllm, not ref",
        ),
    ],
)
def test_invalid_values_are_refused(values: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RolloutConfig(**values)


@pytest.mark.parametrize(
    ("values", "workers"),
    [
        ({}, 1),
        ({"tensor_parallel": 4}, 4),
        ({"tensor_parallel": 4, "quantization": "fp8"}, 1),
        ({"tensor_parallel": 4, "quantization": "fp8", "expert_parallel": True}, 4),
        ({"tensor_parallel": 4, "engine": "mine:engine"}, 1),
        ({"tensor_parallel": 4, "weight_transfer": "object_store"}, 1),
        ({"tensor_parallel": 4, "placement": "colocated"}, 1),
        ({"tensor_parallel": 4, "placement": "colocated", "expert_parallel": True}, 4),
    ],
)
def test_workers_get_their_part_of_the_experts_where_it_is_known_how_they_are_cut(values: dict, workers: int) -> None:
    assert RolloutConfig(**values).weight_shares("cuda") == workers
