"""Every family under every kind of layout: logits equal transformers', exported tensors equal the imported ones."""

from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.models.hf_config import load_hf_config
from tests.checkpoint.round_trip import check_round_trip, write_reference
from tests.distributed import run_ranks
from tests.tiny import tiny_model

DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "llama3-rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
            "tie_word_embeddings": True,
        },
    ),
    "one-kv-head": ("qwen2", {"num_key_value_heads": 1}),
    "five-layers": ("qwen3", {"num_hidden_layers": 5}),
    "qwen3-5-tied": ("qwen3_5", {"tie_word_embeddings": True}),
}
MIXED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-moe": ("qwen3_moe", {}),
    "mixtral": ("mixtral", {}),
    "olmoe": ("olmoe", {}),
    "minimax-m2": ("minimax_m2", {}),
    "glm4-moe": ("glm4_moe", {}),
    "glm4-moe-air": (
        "glm4_moe",
        {
            "use_qk_norm": False,
            "attention_bias": False,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 4,
            "n_shared_experts": 2,
            "first_k_dense_replace": 2,
        },
    ),
    "qwen3-next": ("qwen3_next", {}),
    "qwen3-next-mixed": ("qwen3_next", {"mlp_only_layers": [1], "full_attention_interval": 3}),
    "qwen3-5-moe": ("qwen3_5_moe", {}),
    "qwen3-5-moe-tied": ("qwen3_5_moe", {"tie_word_embeddings": True, "full_attention_interval": 3}),
    "deepseek-v3": ("deepseek_v3", {}),
    "moonlight": (
        "deepseek_v3",
        {"q_lora_rank": None, "rope_scaling": None, "n_group": 1, "num_experts_per_tok": 3, "n_shared_experts": 2},
    ),
    "glm4-moe-lite": ("glm4_moe_lite", {}),
    "gpt-oss": ("gpt_oss", {}),
    "mixed": ("qwen3_moe", {"mlp_only_layers": [0], "decoder_sparse_step": 2, "norm_topk_prob": False}),
}

DIVIDED = {name: case for name, case in MIXED.items() if name != "gpt-oss"}
"""Whose experts can be shared by ranks: those that carry no biases."""

LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, tuple[str, dict[str, Any]]]]] = {
    "one": (1, {}, {**DENSE, **MIXED}),
    "tp2": (2, {"tensor": 2, "sequence_parallel": True}, {**DENSE, **MIXED}),
    "pp2": (2, {"pipeline": 2}, {**DENSE, **MIXED}),
    "vpp": (2, {"pipeline": 2, "virtual_pipeline": 2}, {**DENSE, **MIXED}),
    "ep2": (2, {"expert": 2}, MIXED),
    "tp2-ep2": (2, {"tensor": 2, "expert": 2, "sequence_parallel": True}, MIXED),
    "etp2": (2, {"tensor": 2, "expert_tensor": 2, "sequence_parallel": True}, DIVIDED),
    "tp2-pp2-ep2": (4, {"tensor": 2, "pipeline": 2, "expert": 2, "sequence_parallel": True}, MIXED),
    "tp2-ep2-etp2": (4, {"tensor": 2, "expert": 2, "expert_tensor": 2, "sequence_parallel": True}, DIVIDED),
    "tp4": (
        4,
        {"tensor": 4, "sequence_parallel": True},
        DENSE | {name: MIXED[name] for name in ("olmoe", "glm4-moe", "minimax-m2", "qwen3-next")},
    ),
}


IN_EVERY_RUN = {"one", "tp2", "vpp", "tp2-ep2", "etp2", "tp2-pp2-ep2", "tp4"}
"""Cover every pair of parallel kinds with each other; the rest runs with the whole matrix."""


def _marked(layout: str) -> Any:
    return layout if layout in IN_EVERY_RUN else pytest.param(layout, marks=pytest.mark.full)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {}
    for seed, (name, (family, overrides)) in enumerate({**DENSE, **MIXED}.items()):
        path = tmp_path_factory.mktemp("models") / name
        write_reference(tiny_model(family, path, seed, **overrides), path)
        paths[name] = path
    return paths


@pytest.mark.parametrize("layout", [_marked(layout) for layout in LAYOUTS])
def test_logits_equal_transformers_and_export_equals_import(layout: str, checkpoints: dict[str, Path]) -> None:
    world_size, sizes, cases = LAYOUTS[layout]
    results = run_ranks(check_round_trip, world_size, sizes, [checkpoints[name] for name in cases])
    for name in cases:
        errors = [result[name][0] for result in results]
        assert max(errors) >= 0, "no rank is a last stage"
        assert max(errors) < 1e-4, (name, errors)
        assert results[0][name][1] == len(load_hf_config(checkpoints[name]).tensors)


def disagreeing_table(rank: int, path: Path) -> list[str]:
    """What import says when the layer spec and the family's table differ by one parameter."""
    from megatron_dppo.checkpoint.hf_import import load_hf_weights
    from tests.megatron import build_from

    messages = []
    for option in ({"add_qkv_bias": True}, {"qk_layernorm": False}):
        models, model, groups = build_from(path, {}, load=False, **option)
        with pytest.raises(RuntimeError) as refusal:
            load_hf_weights(models, model, groups)
        messages.append(str(refusal.value))
    return messages


def test_a_parameter_too_many_or_too_few_stops_the_import(checkpoints: dict[str, Path]) -> None:
    many, few = run_ranks(disagreeing_table, 1, checkpoints["qwen3"])[0]
    assert "no table entry for decoder.layers.0.self_attention.linear_qkv.bias" in many
    assert "8 parameters of the table are not in this chunk" in few
    assert "k_layernorm" in few
