"""The tool end to end: the files it writes load, and the warm-up ends where reinforcement learning is to begin."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_dppo.config.load import load_config
from megatron_dppo.tasks.build import build_task
from megatron_dppo.tasks.warm_up import measure

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples" / "tiny_moe_dppo.yaml"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "make_tiny_model.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=550)


@pytest.fixture(scope="module")
def random_model(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("tiny") / "model"
    done = run(out, "--seed", 7, "--random")
    assert done.returncode == 0, done.stderr
    return out


def test_model_has_the_shape_of_the_large_ones(random_model):
    model = AutoModelForCausalLM.from_pretrained(random_model)
    config = model.config
    assert config.model_type == "qwen3_moe"
    assert 1e6 <= sum(p.numel() for p in model.parameters()) <= 2e6
    assert config.num_hidden_layers >= 4
    assert config.mlp_only_layers == []
    assert config.num_experts >= 8
    assert config.num_experts_per_tok == 2
    assert config.num_key_value_heads < config.num_attention_heads
    assert not config.tie_word_embeddings
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert "model.layers.0.self_attn.q_norm.weight" in dict(model.named_parameters())


def test_tokenizer_round_trips_any_text_and_has_a_chat_template(random_model):
    tokenizer = AutoTokenizer.from_pretrained(random_model, local_files_only=True)
    text = "3 + 4 - 2 =\n  naïve  ½ 數 🙂 don't , ."
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("1234")) == 4
    chat = [{"role": "user", "content": "1 + 2"}, {"role": "assistant", "content": "3"}]
    opening = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    assert opening == "<|user|>1 + 2<|assistant|>"
    assert tokenizer.apply_chat_template(chat, tokenize=False) == opening + "3<|end|>"
    assert tokenizer.eos_token == "<|end|>"
    ids = tokenizer.encode(opening + "3<|end|>")
    assert ids[-1] == tokenizer.eos_token_id
    assert len(ids) == 9
    assert tokenizer.decode(ids[-2:], skip_special_tokens=True) == "3"


def test_a_folder_in_use_is_left_alone(random_model):
    before = (random_model / "model.safetensors").read_bytes()
    done = run(random_model, "--random")
    assert done.returncode == 2
    assert "exists already" in done.stderr
    assert (random_model / "model.safetensors").read_bytes() == before


@pytest.mark.slow
def test_warm_up_on_the_demo_ends_partly_right(tmp_path):
    """Sampled accuracy on held-out prompts between 0.2 and 0.5, and nearly every sample well-formed, measured anew from
    the files with other random numbers than the warm-up's own measurements used."""
    out = tmp_path / "model"
    done = run(out, "--seed", 0)
    assert done.returncode == 0, done.stdout + done.stderr
    tokenizer = AutoTokenizer.from_pretrained(out)
    task = build_task(load_config(DEMO).task, tokenizer)
    model = AutoModelForCausalLM.from_pretrained(out)
    measured = measure(model, tokenizer, task, task.held_out(task.held_out_size), samples=4, seed=1234)
    assert 0.2 <= measured.accuracy <= 0.5
    assert measured.well_formed >= 0.9
