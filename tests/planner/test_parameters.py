"""The planner's parameter counts against Megatron-Core's modules, built without weights."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_dppo.compat import megatron_cpu
from megatron_dppo.models.build import build_model
from megatron_dppo.models.hf_config import resolve_hf_config
from megatron_dppo.models.lora.config import LoraConfig
from megatron_dppo.models.megatron_config import transformer_config
from megatron_dppo.models.parallel import ParallelConfig
from megatron_dppo.planner.parameters import (
    Parameters,
    active_per_token,
    exported,
    stage_adapters,
    stage_parameters,
)
from tests.distributed import run_ranks
from tests.models.public_configs import CONFIGS, PARAMETERS

LAYOUTS: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "Qwen3-30B-A3B": [
        (32, {"tensor": 2, "expert": 32, "sequence_parallel": True}),
        (640, {"pipeline": 5, "expert": 64, "expert_tensor": 2, "tensor": 2, "sequence_parallel": True}),
    ],
    "Qwen3-235B-A22B": [
        (512, {"tensor": 4, "pipeline": 4, "virtual_pipeline": 2, "expert": 128, "sequence_parallel": True}),
        (512, {"tensor": 8, "pipeline": 8, "expert": 64, "sequence_parallel": True}),
    ],
    "Qwen3-8B": [(1, {}), (8, {"tensor": 4, "pipeline": 2, "sequence_parallel": True})],
    "DeepSeek-R1-Distill-Qwen-1.5B": [(1, {}), (4, {"tensor": 4, "sequence_parallel": True})],
    "Mixtral-8x7B": [(16, {"tensor": 2, "pipeline": 2, "expert": 4, "sequence_parallel": True})],
    "OLMoE-1B-7B": [(1, {}), (8, {"tensor": 4, "expert": 8, "sequence_parallel": True})],
    "GLM-4.5-Air": [(16, {"tensor": 2, "pipeline": 2, "expert": 8, "sequence_parallel": True})],
    "MiniMax-M2": [(16, {"tensor": 4, "pipeline": 2, "expert": 8, "sequence_parallel": True})],
    "Qwen3-Next-80B-A3B": [(32, {"tensor": 2, "pipeline": 4, "expert": 8, "sequence_parallel": True})],
    "Qwen3.5-27B": [(8, {"tensor": 4, "pipeline": 2, "sequence_parallel": True})],
    "Qwen3.5-35B-A3B": [(32, {"tensor": 2, "pipeline": 2, "expert": 16, "sequence_parallel": True})],
    "Qwen3.5-397B-A17B": [(256, {"tensor": 2, "pipeline": 4, "expert": 64, "sequence_parallel": True})],
    "DeepSeek-V3": [(128, {"tensor": 2, "pipeline": 4, "expert": 32, "sequence_parallel": True})],
    "Kimi-K2": [(256, {"pipeline": 4, "expert": 64})],
    "Moonlight-16B-A3B": [(1, {}), (8, {"tensor": 2, "expert": 8, "sequence_parallel": True})],
    "GLM-4.7-Flash": [(8, {"tensor": 4, "expert": 8, "sequence_parallel": True})],
    "gpt-oss-20b": [(1, {}), (8, {"tensor": 4, "expert": 8, "sequence_parallel": True})],
    "gpt-oss-120b": [(32, {"tensor": 2, "pipeline": 2, "expert": 16, "sequence_parallel": True})],
    "OctoThinker-3B": [(1, {}), (24, {"tensor": 8, "pipeline": 3, "sequence_parallel": True})],
}
LORA = LoraConfig(rank=32)


def counts_of_stages(process: int, name: str, layouts: list[tuple[int, dict[str, Any]]]) -> None:
    """Build one rank of every stage of every layout and compare part by part; then what adapters leave to train."""
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron_dppo.models.groups import initialize_groups
    from megatron_dppo.models.lora.attach import attach_adapters

    megatron_cpu.install()
    model = resolve_hf_config(CONFIGS[name])
    dist.destroy_process_group()
    for world, sizes in layouts:
        parallel = ParallelConfig(**sizes)
        parallel.check_fits(model, world)
        for stage in range(parallel.pipeline):
            rank = stage * (world // parallel.pipeline)
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
            groups = initialize_groups(parallel, seed=0, gloo_copies=False)
            assert groups.pp.rank() == stage
            with torch.device("meta"):
                chunks = build_model(model, transformer_config(model, parallel), groups)
            seen = Parameters()
            for chunk in chunks:
                for parameter_name, parameter in chunk.named_parameters():
                    seen += Parameters(**{part(parameter_name): parameter.numel()})
            assert seen == stage_parameters(model, parallel, stage), (sizes, stage)
            if stage == parallel.pipeline - 1:  # one of each layout: adapters of 128 experts take their time
                lora = (
                    LORA.model_copy(update={"targets": ("qkv", "o")}) if model.moe and model.moe.linear_bias else LORA
                )
                attach_adapters(chunks, model, groups, lora)
                trained = Parameters()
                for chunk in chunks:
                    for parameter_name, parameter in chunk.named_parameters():
                        if parameter.requires_grad:
                            trained += Parameters(**{part(parameter_name): parameter.numel()})
                assert trained == stage_adapters(model, parallel, stage, lora), (sizes, stage)
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def part(name: str) -> str:
    for key, value in (
        ("embedding.", "embedding"),
        ("output_layer.", "head"),
        ("norm", "norms"),
        (".self_attention.", "attention"),
        (".router.", "router"),
        (".mlp.experts.", "experts"),
        (".mlp.", "mlp"),
    ):
        if key in name:
            return value
    raise AssertionError(f"{name} belongs to no part")


@pytest.mark.parametrize("name", CONFIGS)
def test_counts_are_megatron_cores(name: str) -> None:
    run_ranks(counts_of_stages, 1, name, LAYOUTS[name], timeout=300)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_exported_is_the_published_model(name: str) -> None:
    assert exported(resolve_hf_config(CONFIGS[name])) == PARAMETERS[name]


def test_a_token_meets_the_experts_it_chose() -> None:
    model = resolve_hf_config(CONFIGS["Qwen3-30B-A3B"])
    attention = 2048 * (4096 + 2 * 512) + 4096 * 2048
    assert active_per_token(model) == 48 * (attention + 128 * 2048 + 8 * 3 * 2048 * 768)
