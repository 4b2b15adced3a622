"""What vLLM reads of a config.json, and the fields for which it is refused."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from megatron_dppo.errors import UserError
from megatron_dppo.models.engine_fields import NEUTRAL, NEUTRAL_OF_ROPE, SAME_AS
from megatron_dppo.models.families.decoder import FIXED
from megatron_dppo.models.family import families
from megatron_dppo.models.hf_config import load_hf_config, resolve_hf_config
from megatron_dppo.models.rope import SUPPORTED, rope_frequencies
from tests.models.public_configs import CONFIGS
from tests.models.test_rope import KINDS
from tests.tiny import tiny_model

OWN_NAMES = {family.model_type for family in families().values()}
PUBLISHED = {config["model_type"]: config for config in CONFIGS.values()}

HARMLESS = {
    "what an engine may hold and how its batches are made, not what it computes": """
        alibi attn_config position_encoding_type projection_dim projection_size target_layer_count
        use_unified_vision_chunk""",
    "experts of models that have none: vLLM counts them to divide them over ranks": """
        moe_num_experts n_routed_experts num_experts num_local_experts""",
    "the most tokens: vLLM refuses rollout.max_model_len beyond it": """
        max_model_len max_seq_len max_seq_length max_sequence_length max_target_positions model_max_length n_positions
        seq_len seq_length""",
    "refused or resolved by models/hf_config.py, whatever the class": """
        head_dim is_causal layer_types quantization_config text_config rope_scaling rope_theta partial_rotary_factor
        sliding_window original_max_position_embeddings""",
    "float32 by rollout/vllm/start.py, whatever the file says": "head_dtype",
    "of the layer of Qwen2, which Qwen3 replaces": "qk_norm",
    "a method": "get_text_config",
}
SPARED = frozenset(" ".join(HARMLESS.values()).split())

FILES = {"deepseek_v3": "deepseek_v2", "qwen3_5_moe": "qwen3_5"}
"""Of vLLM's models, where one is not called after the model type."""

ANOTHERS = {"qwen3_5": {"moe_intermediate_size", "num_experts_per_tok", "shared_expert_intermediate_size"}}
"""Fields that vLLM reads of another model of the same file."""

READS = """
import importlib.util, json, os, sys
from pathlib import Path

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
from vllm import AsyncEngineArgs
from vllm.transformers_utils.config import get_config
from vllm.usage.usage_lib import UsageContext

def follow(cls, seen):
    reads = cls.__getattribute__

    def read(self, name):
        caller = sys._getframe(1)
        while caller and "/transformers/" in caller.f_code.co_filename:
            caller = caller.f_back
        if caller and "/vllm/" in caller.f_code.co_filename and not name.startswith("_"):
            seen.add(name)
        return reads(self, name)

    cls.__getattribute__ = read
    return lambda: setattr(cls, "__getattribute__", reads)

found = {}
for folder in sys.argv[1:]:
    seen = set()
    config = get_config(folder, False, config_format="hf")  # of some model types it has a class of its own
    restore = [follow(kind, seen) for kind in {type(config), type(config.get_text_config())}]
    options = {"config_format": "hf", "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 64}
    made = AsyncEngineArgs(model=folder, **options)
    # What sees images in vLLM wants torchvision, which an environment without a GPU lacks.
    if config.get_text_config() is config or importlib.util.find_spec("torchvision"):
        made.create_engine_config(UsageContext.ENGINE_CONTEXT)
    [one() for one in restore]
    found[config.model_type] = sorted(seen)
print(json.dumps(found))
"""


def in_a_process(script: str, *arguments: str) -> Any:
    """vLLM is not for the tests' own process."""
    variables = os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def read_by_the_model(model_type: str) -> set[str]:
    """Names in the file of the model's classes, and of those that they build on."""
    module = importlib.util.find_spec(f"vllm.model_executor.models.{FILES.get(model_type, model_type)}")
    assert module is not None
    assert module.origin is not None
    source = Path(module.origin).read_text()
    parents = re.findall(r"^from \.(\w+) import", source, re.MULTILINE)
    own = {name for name in families() if FILES.get(name, name) in parents} - {model_type, "kimi_k2"}
    names = set(re.findall(r"""(?:getattr|hasattr)\(\s*(?:self\.)?config,\s*["'](\w+)["']""", source))
    names |= set(re.findall(r"\bconfig\.(\w+)", source))
    return names.union(*(read_by_the_model(parent) for parent in own))


@cache
def known_to_transformers(model_type: str) -> frozenset[str]:
    config = AutoConfig.for_model(families()[model_type].reference)
    module = type(config).__module__.replace(".configuration_", ".modeling_")
    source = inspect.getsource(importlib.import_module(module))
    return frozenset(set(vars(config)) | set(dir(config)) | set(re.findall(r"\bconfig\.(\w+)", source)))


def test_every_field_that_vllm_alone_reads_has_its_place(tmp_path: Path) -> None:
    for model_type in OWN_NAMES:
        tiny_model(model_type, tmp_path / model_type, num_hidden_layers=1)
    found = in_a_process(READS, *(str(tmp_path / model_type) for model_type in OWN_NAMES))
    assert set(found) == OWN_NAMES
    for model_type, names in found.items():
        family = families()[model_type]
        if not family.text_type or importlib.util.find_spec("torchvision"):
            assert {"dual_chunk_attention_config", "hidden_size", "rswa_window"} <= set(names)  # the record works
        placed = set(NEUTRAL) | set(family.engine) | set(SAME_AS) | SPARED | family.reads
        read = set(names) | read_by_the_model(model_type) - ANOTHERS.get(model_type, set())
        assert read - known_to_transformers(model_type) - placed == set(), model_type


ROTATIONS = """
import json, sys
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

tables = {}
with set_current_vllm_config(VllmConfig()):
    for kind, parameters in json.loads(sys.argv[1]).items():
        made = get_rope(32, max_position=128, rope_parameters=parameters, dtype=torch.float32)
        tables[kind] = made.cos_sin_cache[:128].tolist()
print(json.dumps(tables))
"""


def test_vllm_rotates_as_the_trainer_does() -> None:
    spread = {"beta_fast": 16, "beta_slow": 2, "truncate": False, "attention_factor": None}
    scaled = {"attn_factor": 0.8782488562869419, "attention_factor": 1.0}  # DeepSeek-R1-0528-Qwen3-8B, made whole
    cases = KINDS | {"spread": KINDS["yarn"] | spread, "scaled": KINDS["yarn"] | scaled}
    assert {parameters["rope_type"] for parameters in cases.values()} == set(SUPPORTED)
    tables = in_a_process(ROTATIONS, json.dumps(cases))
    for name, parameters in cases.items():
        config = AutoConfig.for_model("qwen3", head_dim=32, max_position_embeddings=128, rope_parameters=parameters)
        frequencies, factor = rope_frequencies(config)
        angles = torch.arange(128.0)[:, None] * frequencies
        expected = torch.cat([angles.cos(), angles.sin()], dim=-1) * factor
        torch.testing.assert_close(torch.tensor(tables[name]), expected, rtol=1e-4, atol=1e-4)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("model_type", "fields", "named"),
    [
        ("llama", {"qkv_bias": True}, "qkv_bias"),
        ("llama", {"bias": True}, "bias"),
        ("llama", {"logit_scale": 0.25}, "logit_scale"),
        ("qwen2", {"qk_norm": True}, "qk_norm"),
        ("qwen2", {"head_dim": 64}, "head_dim"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 768}, "shared_expert_intermediate_size"),
        ("qwen3_moe", {"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size"),
        ("qwen3_moe", {"dual_chunk_attention_config": {"chunk_size": 262144}}, "dual_chunk_attention_config"),
        ("qwen3", {"num_kv_heads": 2}, "num_kv_heads"),
        ("qwen3", {"rotary_pct": 0.5}, "rotary_pct"),
        ("qwen3", {"rotary_emb_base": 500000}, "rotary_emb_base"),
        ("qwen3", {"compression_config": {"quant_method": "x"}}, "compression_config"),
        ("qwen3", {"speculators_config": {"verifier": {"name_or_path": "a/b"}}}, "speculators_config"),
        ("qwen3", {"rope_scaling": YARN | {"attention_factor": 1.0}}, "rope_parameters.attention_factor"),
        ("qwen3", {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}}, "rope_parameters.mscale"),
        ("qwen3", {"rope_scaling": YARN | {"attn_factor": 0.5}}, "rope_parameters.attn_factor"),
        ("qwen3", {"rope_scaling": YARN | {"attn_factor": None}}, "rope_scaling.attn_factor"),
        ("qwen3", {"rope_scaling": YARN | {"attention_factor": "1.0"}}, "rope_scaling.attention_factor"),
        ("qwen3", {"rope_scaling": YARN | {"beta_fast": None}}, "rope_scaling.beta_fast"),
        ("qwen3", {"rope_scaling": {"rope_type": "default", "mrope_section": [16, 24, 24]}}, "mrope_section"),
    ],
)
def test_what_vllm_would_compute_otherwise_is_refused(model_type: str, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=re.escape(named)) as refusal:
        resolve_hf_config(PUBLISHED[model_type] | fields)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("llama", {"qkv_bias": False, "bias": False, "logit_scale": 1.0}),
        ("qwen2", {"qk_norm": False, "head_dim": 128}),
        ("qwen3_moe", {"shared_expert_intermediate_size": 0, "dual_chunk_attention_config": None}),
        ("qwen3", {"num_kv_heads": 8, "rotary_pct": 1.0, "max_sequence_length": 2048}),
        ("qwen3", {"rope_scaling": YARN | {"attention_factor": 1.138629436, "mscale": 1.0}}),
        ("qwen3", {"rope_scaling": YARN | {"attn_factor": 1.0, "extrapolation_factor": 1}}),
        ("qwen3", {"rope_scaling": YARN | {"attn_factor": 0.8782488562869419, "attention_factor": 1.0}}),
    ],
)
def test_neutral_values_are_taken(model_type: str, fields: dict[str, Any]) -> None:
    resolve_hf_config(PUBLISHED[model_type] | fields)


def test_a_quantization_beside_the_configuration_is_refused(tmp_path: Path) -> None:
    """vLLM reads the file wherever config.json has none."""
    tiny_model("qwen3", tmp_path, num_hidden_layers=1)
    load_hf_config(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    with pytest.raises(UserError, match="hf_quant_config"):
        load_hf_config(tmp_path)


def test_the_tables_have_no_field_that_transformers_reads() -> None:
    """Such a field would be the family's to judge."""
    for model_type in OWN_NAMES:
        fields = set(NEUTRAL) | set(families()[model_type].engine) | set(SAME_AS)
        assert not fields & set(vars(AutoConfig.for_model(families()[model_type].reference)))
    assert "rope_type" not in NEUTRAL_OF_ROPE


def changed(config: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """The same with these fields of its decoder, and where there is one of the whole."""
    if "text_config" not in config:
        return config | fields
    whole = {name: value for name, value in fields.items() if name in config}
    return config | whole | {"text_config": config["text_config"] | fields}


@pytest.mark.parametrize("model_type", sorted(OWN_NAMES))
def test_each_field_of_a_family_has_its_refusal(model_type: str) -> None:
    """With any value but those that change nothing, by name; and with those it is taken."""
    family, published = families()[model_type], PUBLISHED[model_type]
    for name, neutral in family.engine.items():
        number = any(isinstance(value, int) for value in neutral)
        with pytest.raises(UserError, match=name):
            resolve_hf_config(changed(published, {name: 7 if number else "something"}))
        for value in neutral:
            resolve_hf_config(changed(published, {name: value}))
    for name, neutral in (FIXED | dict(family.fixed) | dict(family.engine_takes)).items():
        other = not neutral if isinstance(neutral, bool) else (neutral or 0.5) * 2
        with pytest.raises(UserError, match=name):
            resolve_hf_config(changed(published, {name: other}))


TIES = re.compile(r"tie_weights\(|lm_head(\.weight)? = self\.model\.embed_tokens")


@pytest.mark.parametrize("model_type", sorted(OWN_NAMES))
def test_a_tied_head_is_refused_where_vllm_ties_none(model_type: str) -> None:
    """It starts from such a checkpoint without a word, and samples from whatever lies in memory."""
    spec = importlib.util.find_spec(f"vllm.model_executor.models.{FILES.get(model_type, model_type)}")
    assert spec is not None
    assert spec.origin is not None
    ties, config = bool(TIES.search(Path(spec.origin).read_text())), PUBLISHED[model_type]
    assert ties == (families()[model_type].engine_takes.get("tie_word_embeddings") is None)
    if ties:
        assert resolve_hf_config(changed(config, {"tie_word_embeddings": True})).tied
        return
    with pytest.raises(UserError, match="tie_word_embeddings is True"):
        resolve_hf_config(changed(config, {"tie_word_embeddings": True}))


@pytest.mark.parametrize("fields", [{"norm_topk_prob": True}, {"head_dim": 64}], ids=lambda fields: next(iter(fields)))
def test_what_vllms_olmoe_leaves_out(tmp_path: Path, fields: dict[str, Any]) -> None:
    tiny_model("olmoe", tmp_path, num_hidden_layers=1)
    load_hf_config(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    with pytest.raises(UserError, match=next(iter(fields))):
        load_hf_config(tmp_path)
