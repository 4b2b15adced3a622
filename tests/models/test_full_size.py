"""Published models at full size, without their weights: names, shapes, and every rank of realistic layouts."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_dppo.checkpoint.hf_export import check_tiling
from megatron_dppo.compat import megatron_cpu
from megatron_dppo.models.build import build_model
from megatron_dppo.models.hf_config import resolve_hf_config
from megatron_dppo.models.live import owned_parameters
from megatron_dppo.models.megatron_config import transformer_config
from megatron_dppo.models.names import Block, is_expert
from megatron_dppo.models.parallel import ParallelConfig
from tests.distributed import run_ranks
from tests.models.public_configs import CONFIGS, PARAMETERS

LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "30B-tp2-ep4": ("Qwen3-30B-A3B", 8, {"tensor": 2, "expert": 4, "sequence_parallel": True}),
    "235B-tp4-pp8-ep8": ("Qwen3-235B-A22B", 64, {"tensor": 4, "pipeline": 8, "expert": 8, "sequence_parallel": True}),
    "235B-vpp": (
        "Qwen3-235B-A22B",
        16,
        {"tensor": 2, "pipeline": 4, "virtual_pipeline": 2, "expert": 4, "sequence_parallel": True},
    ),
    "8B-tp4": ("Qwen3-8B", 4, {"tensor": 4, "sequence_parallel": True}),
    "1.5B-tp4": ("DeepSeek-R1-Distill-Qwen-1.5B", 4, {"tensor": 4, "sequence_parallel": True}),
    "8x7B-tp2-pp2-ep4": ("Mixtral-8x7B", 16, {"tensor": 2, "pipeline": 2, "expert": 4, "sequence_parallel": True}),
    "106B-tp4-pp2-ep8": ("GLM-4.5-Air", 16, {"tensor": 4, "pipeline": 2, "expert": 8, "sequence_parallel": True}),
    "229B-tp4-pp2-ep8": ("MiniMax-M2", 16, {"tensor": 4, "pipeline": 2, "expert": 8, "sequence_parallel": True}),
    "671B-tp4-pp4-ep32": ("DeepSeek-V3", 128, {"tensor": 4, "pipeline": 4, "expert": 32, "sequence_parallel": True}),
    "30B-mla-tp2-ep8": ("GLM-4.7-Flash", 8, {"tensor": 2, "expert": 8, "sequence_parallel": True}),
    "20b-tp4-ep8": ("gpt-oss-20b", 8, {"tensor": 4, "expert": 8, "sequence_parallel": True}),
    "1B-7B-tp4-ep8": ("OLMoE-1B-7B", 8, {"tensor": 4, "expert": 8, "sequence_parallel": True}),
    "3B-tp8-pp2": ("OctoThinker-3B", 16, {"tensor": 8, "pipeline": 2, "sequence_parallel": True}),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_tensors_are_those_of_the_published_model(name: str) -> None:
    """transformers, on meta, is the witness of names and shapes; the hub's count of their sum."""
    from transformers import AutoConfig

    from tests.tiny import auto_class

    raw = CONFIGS[name]
    model = resolve_hf_config(raw)
    trained = {tensor: shape for tensor, shape in model.tensors.items() if tensor not in model.float32_tensors}
    assert sum(torch.Size(shape).numel() for shape in trained.values()) == PARAMETERS[name]
    with torch.device("meta"):
        config = AutoConfig.for_model(**copy.deepcopy(raw)) if "text_config" in raw else model.config
        witness = auto_class(config).from_config(config)
    stacked = {k: tuple(v.shape) for k, v in witness.state_dict().items() if not model.carries(k)}
    if model.tied:
        del stacked["lm_head.weight"]
    assert (model.stacked_tensors or model.tensors) == stacked


def blocks_of_rank(process: int, name: str, world_size: int, layout: dict[str, Any], ranks: list[int]) -> int:
    """Build the named ranks on meta, one after another, and check that their blocks tile every tensor."""
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron_dppo.models.groups import initialize_groups

    megatron_cpu.install()
    model, parallel = resolve_hf_config(CONFIGS[name]), ParallelConfig(**layout)
    parallel.check_fits(model, world_size)
    blocks: dict[str, set[Block]] = {tensor: set() for tensor in model.tensors}
    built = 0
    dist.destroy_process_group()
    for rank in ranks:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        groups = initialize_groups(parallel, seed=0, gloo_copies=False)
        with torch.device("meta"):
            chunks = build_model(model, transformer_config(model, parallel), groups)
        whole = {name: transform.shape(model, 1) for name, transform in model.parameters()}
        for owned in owned_parameters(chunks, model, groups):
            assert tuple(owned.parameter.shape) == owned.shape, owned.name
            if not is_expert(owned.name):  # the norm of gradients counts what ranks do not divide once
                divided = owned.shape != whole[owned.name]
                assert getattr(owned.parameter, "tensor_model_parallel", False) == divided, owned.name
            small = owned.pieces and owned.pieces[0].hf_name in model.float32_tensors  # a buffer is made where it stays
            assert owned.parameter.is_meta or small
            for piece in owned.pieces:
                blocks[piece.hf_name].add(piece.source)
            built += owned.parameter.numel()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    for tensor, shape in model.tensors.items():
        check_tiling(tensor, shape, sorted(blocks[tensor]))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return built


def _marked(layout: str) -> Any:
    return (
        pytest.param(layout, marks=pytest.mark.full) if layout.startswith(("671B", "235B", "229B", "106B")) else layout
    )


@pytest.mark.parametrize("layout", [_marked(layout) for layout in LAYOUTS])
def test_every_rank_builds_and_the_ranks_hold_every_tensor_once(layout: str) -> None:
    name, world_size, sizes = LAYOUTS[layout]
    parallel = ParallelConfig(**sizes)
    one_copy = max(parallel.tensor, parallel.expert)  # of each stage; the next ranks repeat it
    ranks = [rank for rank in range(world_size) if rank % (world_size // parallel.pipeline) < one_copy]
    run_ranks(blocks_of_rank, 1, name, world_size, sizes, ranks, timeout=400)
