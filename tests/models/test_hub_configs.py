"""Models as people publish them: what transformers computes from such a config.json is computed here, or the field that
would change it is named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from megatron_dppo.errors import UserError
from megatron_dppo.models.family import text_fields, transformers_config
from megatron_dppo.models.hf_config import resolve_hf_config
from megatron_dppo.models.packed_logits import packed_logits
from megatron_dppo.models.rope import rope_frequencies
from tests.distributed import run_ranks
from tests.megatron import build_from
from tests.models.hub_configs import LOADED, REFUSED
from tests.tiny import SEEING, auto_class

_MOE, _DENSE = LOADED["Qwen/Qwen3-30B-A3B"], LOADED["Qwen/Qwen3-8B"]
UNPUBLISHED: dict[str, dict[str, Any]] = {
    "one expert a token, whose weight is 1": _MOE | {"num_experts_per_tok": 1, "norm_topk_prob": True},
    "one expert a token, with the weight it has": _MOE | {"num_experts_per_tok": 1, "norm_topk_prob": False},
    "no layer slides": _DENSE | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    "nothing to slide over": _MOE | {"use_sliding_window": True, "sliding_window": None},
    "a window that is off": _DENSE | {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0},
    "groups of experts, ranked by the best two": LOADED["zai-org/GLM-4.5"]
    | {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "n_routed_experts": 16},
    "all groups of experts": LOADED["zai-org/GLM-4.5"] | {"n_group": 4, "topk_group": 4},
    "three of eight dimensions rotated": LOADED["zai-org/GLM-4.5-Air"] | {"partial_rotary_factor": 0.375},
    "GLM with yarn": LOADED["zai-org/GLM-4.5"]
    | {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 131072}},
    "an epsilon that the norms of latent vectors do not have": LOADED["zai-org/GLM-4.7-Flash"] | {"rms_norm_eps": 1e-2},
    "heads as wide as the hidden size gives": {name: value for name, value in _MOE.items() if name != "head_dim"},
    "settings of generate": _DENSE | {"do_sample": True, "max_length": 4096, "temperature": 0.9, "top_k": 50},
    "neutral values": _DENSE | {"is_causal": True, "quantization_config": None, "partial_rotary_factor": 1.0},
}
"""What transformers makes of fields that no file above has."""
LENGTHS = [40, 5, 19]
VOCAB = 160


def cut(config: dict[str, Any]) -> dict[str, Any]:
    """The same with tiny sizes; every other field is as published."""
    if (text := text_fields(config)) is not config:
        vision = SEEING[config["model_type"]]["vision_config"]
        return config | {"text_config": cut(text), "vision_config": config["vision_config"] | vision}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4 if heads == kv_heads else 2,
        "vocab_size": VOCAB,
        "head_dim": 32,
        "num_experts": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "rotary_dim": 16,
        "q_lora_rank": config.get("q_lora_rank") and 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_group": config.get("n_group") if config.get("n_group") != 8 else 2,
        "topk_group": config.get("topk_group") if config.get("n_group") != 8 else 1,
        "first_k_dense_replace": 1,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 8,
    }
    if config["model_type"] == "gpt_oss":
        sizes |= {"intermediate_size": 32, "sliding_window": 8}
        config = config | {"layer_types": config["layer_types"][:2]}
    if "linear_num_key_heads" in config:  # others leave it out
        sizes["shared_expert_intermediate_size"] = 24
        config = config | {"layer_types": ["linear_attention", "full_attention"]}
    if "mrope_section" in (rope := config.get("rope_parameters") or {}):
        config = config | {"rope_parameters": rope | {"mrope_section": [2, 1, 1]}}
    if config.get("num_experts_per_tok") in (1, 4):
        sizes["num_experts_per_tok"] = config["num_experts_per_tok"]
    if config.get("n_routed_experts") == 16:
        sizes["n_routed_experts"] = 16
    small = config | {name: size for name, size in sizes.items() if name in config}
    if (config.get("pad_token_id") or 0) >= VOCAB:
        small["pad_token_id"] = VOCAB - 1
    return small


def publish(folder: Path, config: dict[str, Any], seed: int) -> None:
    """Random weights by transformers, from the file alone, and what they give."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    whole = AutoConfig.from_pretrained(folder) if text_fields(config) is not config else transformers_config(folder)
    model = auto_class(whole).from_config(whole, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            centre = 1.0 if parameter.ndim == 1 and parameter.abs().max() > 0 else 0.0
            parameter.copy_(centre + (0.2 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5) * noise)
        model.tie_weights()
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
        ids = torch.randint(0, VOCAB, (sum(LENGTHS),), generator=generator)
        logits = torch.cat([model(part[None]).logits[0] for part in ids.split(LENGTHS)])
    model.save_pretrained(folder)
    torch.save({"ids": ids, "logits": logits}, folder / "reference.pt")
    (folder / "config.json").write_text(json.dumps(config))


def logit_errors(rank: int, folders: dict[str, Path]) -> dict[str, float | str]:
    errors: dict[str, float | str] = {}
    for name, folder in folders.items():
        reference = torch.load(folder / "reference.pt", weights_only=True)
        try:
            chunks, _, _ = build_from(folder, {})
        except UserError as error:
            errors[name] = str(error)
            continue
        (logits,) = packed_logits(chunks, [(reference["ids"], LENGTHS)])
        errors[name] = (logits[:, :VOCAB] - reference["logits"]).abs().max().item()
    return errors


def test_there_are_enough_of_them() -> None:
    assert len(LOADED) >= 50
    assert len(LOADED) + len(REFUSED) >= 60


def test_logits_equal_transformers(tmp_path: Path) -> None:
    configs = LOADED | UNPUBLISHED
    folders = {name: tmp_path / str(number) for number, name in enumerate(configs)}
    for number, (name, folder) in enumerate(folders.items()):
        publish(folder, cut(configs[name]), number)
    errors = run_ranks(logit_errors, 1, folders)[0]
    wrong = {name: error for name, error in errors.items() if isinstance(error, str) or not error < 1e-4}
    assert not wrong
    assert len(errors) == len(configs)


def test_files_as_transformers_writes_them_are_read_alike(tmp_path: Path) -> None:
    """With `dtype` and `rope_parameters`, every field spelled out or the unusual ones alone."""
    for number, (name, config) in enumerate(LOADED.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        seeing = text_fields(config) is not config
        known = AutoConfig.from_pretrained(folder) if seeing else transformers_config(folder)
        expected = _read(config)
        for unusual_alone in (False, True):
            assert _read(json.loads(known.to_json_string(use_diff=unusual_alone))) == expected, name


def _read(config: dict[str, Any]) -> dict[str, Any]:
    model = resolve_hf_config(config)
    aside = ("family", "path", "config", "ignored")
    return {one.name: getattr(model, one.name) for one in dataclasses.fields(model) if one.name not in aside}


@pytest.mark.parametrize("name", LOADED)
def test_sizes_are_read_as_published(name: str) -> None:
    model, config = resolve_hf_config(LOADED[name]), text_fields(LOADED[name])
    sizes = (model.hidden_size, model.layers, model.heads, model.kv_heads, model.vocab_size)
    assert sizes == tuple(
        config[field]
        for field in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
    )
    usual = model.hidden_size // model.heads
    if model.latent:
        usual = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    assert model.head_dim == config.get("head_dim", usual)
    assert model.tied == LOADED[name]["tie_word_embeddings"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_transformers_would_compute_otherwise_is_refused_by_its_field(name: str) -> None:
    config, field = REFUSED[name]
    with pytest.raises(UserError, match=field) as refusal:
        resolve_hf_config(config)
    assert "\n" not in str(refusal.value)


def test_minimax_rotates_the_dimensions_that_its_file_says() -> None:
    """transformers 5.17 reads another field; vLLM and the model's own code read this one."""
    config = LOADED["MiniMaxAI/MiniMax-M2, without its 8-bit numbers"]
    for fields, rotated in (({}, 64), ({"rotary_dim": 32}, 32), ({"partial_rotary_factor": 0.25}, 32)):
        model = resolve_hf_config(config | fields)
        frequencies, _ = rope_frequencies(model.config)
        assert (model.rotary_factor * 128, 2 * len(frequencies)) == (rotated, rotated)
        exact = 5e6 ** -(torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
        torch.testing.assert_close(frequencies.double(), exact, rtol=1e-6, atol=0)


def test_fields_that_transformers_does_not_read_are_named() -> None:
    ignored = {name: set(resolve_hf_config(config).ignored) for name, config in LOADED.items()}
    assert ignored["Qwen/Qwen3-Coder-30B-A3B-Instruct"] == {
        "qkv_bias",
        "shared_expert_intermediate_size",
        "use_qk_norm",
    }
    assert ignored["HuggingFaceTB/SmolLM2-135M-Instruct"] == {
        "is_llama_config",
        "rope_interleaved",
        "transformers.js_config",
    }
    assert ignored["NousResearch/Yarn-Llama-2-7b-64k"] == {"_name_or_path", "auto_map"}
