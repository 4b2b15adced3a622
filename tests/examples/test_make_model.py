"""The tiny model: its shape, its determinism, and how much the warm-up teaches it."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

TOOL = Path(__file__).resolve().parents[2] / "examples/tiny_moe_dppo/make_model.py"


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_tiny_model", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_seed_gives_the_same_files(tmp_path):
    tool = load_tool()
    for folder, seed in (("a", "5"), ("b", "5"), ("c", "6")):
        assert tool.main([str(tmp_path / folder), "--seed", seed, "--random"]) == 0
    files = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert "model.safetensors" in files
    assert "tokenizer.json" in files
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    other = (tmp_path / "c/model.safetensors").read_bytes()
    assert (tmp_path / "a/model.safetensors").read_bytes() != other

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    config = model.config
    assert 1e6 <= model.num_parameters() <= 2e6
    assert config.num_hidden_layers >= 4
    assert config.num_experts >= 8
    assert config.num_experts_per_tok == 2
    assert config.num_key_value_heads < config.num_attention_heads
    assert not config.tie_word_embeddings
    assert "model.layers.0.self_attn.q_norm.weight" in model.state_dict()

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert tokenizer.decode(tokenizer.encode("7+4-9 = zwölf")) == "7+4-9 = zwölf"
    chat = [{"role": "user", "content": "7+4-9"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert prompt == "<|user|>7+4-9<|assistant|>"


def test_a_folder_that_exists_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(SystemExit) as ended:
        load_tool().main([str(tmp_path), "--random"])
    assert ended.value.code == 2
    assert "exists already" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


@pytest.mark.slow
def test_the_demos_model_is_partly_right(tmp_path):
    """Sampled held-out accuracy between 0.2 and 0.5, and nearly every answer well-formed already."""
    command = [sys.executable, str(TOOL), str(tmp_path / "model"), "--seed", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    measured = re.findall(r"held-out accuracy ([\d.]+), well-formed ([\d.]+)", done.stdout)[-1]
    accuracy, well_formed = map(float, measured)
    assert 0.2 <= accuracy <= 0.5
    assert well_formed >= 0.95


def test_a_wider_model_has_shapes_that_blockwise_fp8_takes(tmp_path):
    assert load_tool().main([str(tmp_path / "wide"), "--width", "2", "--random"]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "wide")
    quantised = {n: p.shape for n, p in model.named_parameters() if "_proj" in n}
    assert quantised
    assert all(size % 128 == 0 for shape in quantised.values() for size in shape[-2:]), quantised
