"""Layouts that do not fit are refused with one line that says what to change."""

from typing import Any

import pytest

from megatron_dppo.errors import UserError
from megatron_dppo.models.hf_config import HFConfig, resolve_hf_config
from megatron_dppo.models.megatron_config import uneven_layout
from megatron_dppo.models.parallel import ParallelConfig
from tests.models.public_configs import CONFIGS
from tests.models.test_hf_config import MOE


@pytest.fixture
def model() -> HFConfig:
    return resolve_hf_config(MOE)


@pytest.mark.parametrize(
    ("sizes", "world_size", "named"),
    [
        ({"tensor": 2, "sequence_parallel": True}, 3, "world size 3"),
        ({"expert": 4}, 6, "expert_tensor x expert x pipeline"),
        ({"expert": 3}, 3, "8 experts"),
        ({"tensor": 8, "sequence_parallel": True}, 8, "4 attention heads"),
        ({"expert_tensor": 64}, 64, "intermediate size 32"),
        ({"pipeline": 4, "virtual_pipeline": 2}, 4, "6 layers"),
        ({"virtual_pipeline": 2}, 1, "pipeline > 1"),
        ({"sequence_parallel": True}, 1, "sequence_parallel"),
        ({"tensor": 2}, 2, "sequence_parallel: true"),
        ({"overlap_expert_exchange": True}, 2, "needs expert > 1"),
        ({"overlap_expert_exchange": True, "expert": 2, "pipeline": 2}, 4, "needs virtual_pipeline > 1"),
    ],
)
def test_misfits_are_refused(sizes: dict[str, Any], world_size: int, named: str, model: HFConfig) -> None:
    with pytest.raises(UserError, match=named) as refusal:
        ParallelConfig(**sizes).check_fits(model, world_size)
    assert "\n" not in str(refusal.value)


def test_an_exchange_is_overlapped_where_the_last_layer_has_experts() -> None:
    parallel = ParallelConfig(expert=2, overlap_expert_exchange=True)
    parallel.check_fits(resolve_hf_config(MOE), 2)
    with pytest.raises(UserError, match=r"needs experts in the last layer"):
        parallel.check_fits(resolve_hf_config(MOE | {"mlp_only_layers": [5]}), 2)


def test_heads_of_a_delta_rule_are_divided_among_tensor_and_context_ranks() -> None:
    model = resolve_hf_config(CONFIGS["Qwen3-Next-80B-A3B"])
    ParallelConfig(tensor=4, context=4, sequence_parallel=True).check_fits(model, 16)
    with pytest.raises(UserError, match=r"16 key heads cannot be divided by tensor x context = 8 x 4"):
        ParallelConfig(tensor=8, context=4, sequence_parallel=True).check_fits(model, 32)


def test_windows_and_experts_with_biases_are_not_divided() -> None:
    model = resolve_hf_config(CONFIGS["gpt-oss-20b"])
    ParallelConfig(tensor=2, expert=4, sequence_parallel=True).check_fits(model, 8)
    with pytest.raises(
        UserError, match=r"gpt_oss carry biases, which expert_tensor = 2 ranks cannot share; set it to 1"
    ):
        ParallelConfig(tensor=2, expert_tensor=2, sequence_parallel=True).check_fits(model, 2)
    with pytest.raises(UserError, match=r"attend through windows, which context = 2 ranks cannot share; set it to 1"):
        ParallelConfig(context=2).check_fits(model, 2)


@pytest.mark.parametrize(
    ("name", "tensor", "named"),
    [
        ("GLM-4.7-Flash", 4, ""),
        ("GLM-4.7-Flash", 8, "20 attention heads"),
        ("Moonlight-16B-A3B", 16, ""),
        ("DeepSeek-V3", 64, ""),
        ("DeepSeek-V3", 128, "latent vectors of 1536 and 576 numbers cannot be divided by tensor = 128"),
    ],
)
def test_latent_vectors_are_divided_among_tensor_ranks(name: str, tensor: int, named: str) -> None:
    model, parallel = resolve_hf_config(CONFIGS[name]), ParallelConfig(tensor=tensor, sequence_parallel=True)
    if not named:
        parallel.check_fits(model, tensor)
        return
    with pytest.raises(UserError, match=named):
        parallel.check_fits(model, tensor)


def test_experts_of_a_dense_model_are_refused() -> None:
    dense = {k: v for k, v in MOE.items() if "exp" not in k and "moe" not in k}
    model = resolve_hf_config(dense | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]})
    with pytest.raises(UserError, match="no experts"):
        ParallelConfig(expert=2).check_fits(model, 2)
    ParallelConfig(tensor=2).check_fits(model, 4)


def test_layouts_that_fit(model: HFConfig) -> None:
    ParallelConfig(tensor=2, pipeline=3, virtual_pipeline=2, expert=2, sequence_parallel=True).check_fits(model, 12)
    assert ParallelConfig(tensor=2, pipeline=2).data(12) == 3


@pytest.mark.parametrize(("layers", "stages", "chunks"), [(94, 4, 1), (94, 8, 1), (94, 16, 1), (7, 2, 3), (5, 4, 1)])
def test_uneven_pipelines_hold_every_layer_and_spare_the_ends(layers: int, stages: int, chunks: int) -> None:
    layout = uneven_layout(layers, stages, chunks)
    assert layout is not None
    assert len(layout) == stages * chunks
    counts = [chunk.count("decoder") for chunk in layout]
    assert sum(counts) == layers
    assert layout[0][0] == "embedding"
    assert layout[-1][-1] == "loss"
    assert max(counts) - min(counts) <= 2
    assert max(counts[0], counts[-1]) <= min(counts[1:-1])


def test_even_pipelines_need_no_layout() -> None:
    assert uneven_layout(48, 4, 2) is None
