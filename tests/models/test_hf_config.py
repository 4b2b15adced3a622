"""config.json: what is read, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.errors import UserError
from megatron_dppo.models.family import families
from megatron_dppo.models.hf_config import load_hf_config, resolve_hf_config
from megatron_dppo.router_replay.record import RouteSchema
from tests.models.public_configs import CONFIGS

MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 300,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
}


def test_every_family_is_there() -> None:
    dense = {"qwen3", "qwen2", "llama", "qwen3_5"}
    moe = {"qwen3_moe", "mixtral", "olmoe", "glm4_moe", "minimax_m2", "qwen3_next", "qwen3_5_moe", "gpt_oss"}
    assert set(families()) == dense | moe | {"deepseek_v3", "kimi_k2", "glm4_moe_lite"}


@pytest.mark.parametrize(
    ("change", "routing"),
    [
        ({}, (0, 1, 2, 3, 4, 5)),
        ({"mlp_only_layers": [0, 2]}, (1, 3, 4, 5)),
        ({"decoder_sparse_step": 2}, (1, 3, 5)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (1, 5)),
    ],
)
def test_an_engine_records_the_layers_that_route(change: dict[str, Any], routing: tuple[int, ...]) -> None:
    assert resolve_hf_config(MOE | change).routes == RouteSchema(6, routing, num_experts=8, topk=2)
    assert resolve_hf_config(MOE | {"num_experts": 0}).routes is None


def test_routes_of_a_family_with_other_names_for_its_experts() -> None:
    """`n_routed_experts`: vLLM knows no `num_experts` of this model."""
    glm = resolve_hf_config(CONFIGS["GLM-4.5-Air"])
    assert glm.routes == RouteSchema(46, tuple(range(1, 46)), num_experts=128, topk=8)
    assert glm.float32_tensors == {f"model.layers.{n}.mlp.gate.e_score_correction_bias" for n in range(1, 46)}
    assert [glm.carries(f"model.layers.{n}.eh_proj.weight") for n in (45, 46, 47)] == [False, True, False]


def test_sizes_and_layer_kinds() -> None:
    model = resolve_hf_config(MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": True})
    assert model.moe is not None
    assert model.moe.layers == (False, True, False, False, False, True)
    assert model.moe.normalise
    assert model.has_dense_layers
    assert model.dims == {"hidden": 64, "head_dim": 32, "query": 128, "key": 64, "ffn": 96, "experts": 8, "moe_ffn": 32}
    assert not resolve_hf_config(MOE).has_dense_layers


def test_both_spellings_of_the_number_of_experts() -> None:
    renamed = {k: v for k, v in MOE.items() if k != "num_experts"} | {"num_local_experts": 8}
    assert resolve_hf_config(renamed).moe == resolve_hf_config(MOE).moe


@pytest.mark.parametrize(("tensor", "padded"), [(1, 384), (2, 384), (8, 384), (3, 384), (5, 640)])
def test_padded_vocabulary_is_the_least_multiple(tensor: int, padded: int) -> None:
    assert resolve_hf_config(MOE).padded_vocab_size(tensor) == padded


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"architectures": ["Qwen3MoeForSequenceClassification"]}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"use_sliding_window": True, "sliding_window": 128}, "use_sliding_window"),
        ({"use_sliding_window": True}, "use_sliding_window"),  # over transformers' default of 4096 tokens
        ({"sliding_window": 128, "use_sliding_window": True, "layer_types": None}, "use_sliding_window"),
        ({"layer_types": ["sliding_attention"] * 6}, "sliding_attention"),
        ({"is_causal": False}, "is_causal"),
        ({"attention_chunk_size": 64}, "attention_chunk_size"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"per_layer_config": {"0": {"hidden_size": 32}}}, "per_layer_config"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"mlp_only_layers": list(range(6))}, "mlp_only_layers"),
    ],
)
def test_what_changes_the_mathematics_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named) as refusal:
        resolve_hf_config(MOE | change)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_the_window_that_transformers_resolves_decides(model_type: str) -> None:
    architecture = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[model_type]
    dense = {k: v for k, v in MOE.items() if "experts" not in k and k not in ("moe_intermediate_size", "head_dim")}
    config = dense | {"model_type": model_type, "architectures": [architecture], "use_sliding_window": True}
    assert resolve_hf_config(config).layers == 6  # of which none slides: max_window_layers is 28
    assert resolve_hf_config(config | {"max_window_layers": 0, "sliding_window": None}).layers == 6
    for window in ({}, {"sliding_window": 64}):
        with pytest.raises(UserError, match="use_sliding_window is true"):
            resolve_hf_config(config | window | {"max_window_layers": 3})


def test_fields_that_transformers_does_not_read_have_no_effect() -> None:
    strange = {"n_shared_experts": 1, "_model_name_or_path": "x", "unk_token_id": 3, "to_dict": 1, "mlp_bias": True}
    model = resolve_hf_config(MOE | strange)
    assert set(model.ignored) == set(strange)
    assert model.tensors == resolve_hf_config(MOE).tensors
    scaling = {"rope_scaling": {"type": "linear", "factor": 2.0}}
    resolve_hf_config(MOE | scaling)
    assert scaling == {"rope_scaling": {"type": "linear", "factor": 2.0}}, "transformers wrote into it"


def test_code_that_a_config_brings_is_named_and_not_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = MOE | {"auto_map": {"AutoModelForCausalLM": "modeling_x.XForCausalLM"}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    (tmp_path / "modeling_x.py").write_text("raise SystemExit('it ran')")
    assert load_hf_config(tmp_path).ignored == ("auto_map",)
    assert "auto_map names code, which is not run" in caplog.text


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"hidden_size": -64}, "hidden_size is -64"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"vocab_size": None}, "vocab_size"),
        ({"head_dim": "32"}, "head_dim"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
        ({"rope_theta": None}, "rope_theta is None"),
        ({"rope_theta": "1e6"}, "rope_theta is '1e6'"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope_scaling.factor is 0"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "rope_type"),
        ({"mlp_only_layers": 3}, "mlp_only_layers"),
        ({"model_type": ["qwen3_moe"]}, "model_type"),
        ({"architectures": "Qwen3MoeForCausalLM"}, "architectures"),
    ],
)
def test_values_of_the_wrong_kind_are_one_line(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MOE | change))
    with pytest.raises(UserError, match=named) as refusal:
        load_hf_config(tmp_path)
    assert "\n" not in str(refusal.value)
    assert f"{tmp_path}/config.json" in str(refusal.value)


def test_unused_sliding_window_is_accepted() -> None:
    assert resolve_hf_config(MOE | {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 3})


def test_folder_faults_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load_hf_config(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file is a file; point"):
        load_hf_config(tmp_path / "file")
    with pytest.raises(UserError, match=r"no config\.json"):
        load_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        load_hf_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(MOE | {"num_hidden_layers": "six"}))
    with pytest.raises(UserError, match="num_hidden_layers"):
        load_hf_config(tmp_path)
