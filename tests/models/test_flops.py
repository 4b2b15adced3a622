"""FLOPs of a step against those that torch counts in transformers' model, with PEFT's adapters and without."""

from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_dppo.models.flops import training_flops
from megatron_dppo.models.hf_config import HFConfig, load_hf_config
from megatron_dppo.models.lora.config import LoraConfig
from tests.tiny import tiny_model

PROJECTIONS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}


TOKENS = 24


def products_of(model: torch.nn.Module) -> int:
    """FLOPs of the products of a forward and backward pass, as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(2, 2 + TOKENS)[None], use_cache=False).logits.sum().backward()
    counted = counter.get_flop_counts()["Global"]
    return sum(counted.get(operator, 0) for operator in (torch.ops.aten.mm, torch.ops.aten.addmm))


def attention_of(model: HFConfig) -> int:
    attending = [layer for layer in range(model.layers) if not model.is_delta_layer(layer)]
    pairs = sum(float(model.pairs(layer, np.array(TOKENS))) for layer in attending)
    return int(6 * model.heads * (model.head_dim + model.value_dim) * pairs)


def delta_rule_of(model: HFConfig) -> int:
    """The rule (`tests/compat/test_torch_delta_rule.py` counts it) and its convolution, which are no such products."""
    if not (delta := model.delta):
        return 0
    of_a_token = 18 * delta.value_heads * delta.key_dim * delta.value_dim + 6 * delta.convolved * delta.convolution
    return sum(delta.layers) * TOKENS * of_a_token


@pytest.mark.parametrize("targets", [None, ("qkv", "o", "mlp"), ("mlp",)])
def test_products_with_weights_are_counted(tmp_path: Path, targets: tuple[str, ...] | None) -> None:
    """Attention has no weights: its products are other operators, and the formula's n^2."""
    model = tiny_model("qwen3", tmp_path).train()
    lora = None
    if targets:
        lora = LoraConfig(rank=5, targets=targets)
        names = [name for target in targets for name in PROJECTIONS[target]]
        model = peft.get_peft_model(model, peft.LoraConfig(r=5, target_modules=names))
        model.enable_input_require_grads()
    described = load_hf_config(tmp_path)
    assert products_of(model) == training_flops(described, np.array([TOKENS]), lora) - attention_of(described)


@pytest.mark.parametrize(
    "family", ["mixtral", "glm4_moe", "minimax_m2", "qwen3_next", "qwen3_5_moe", "deepseek_v3", "gpt_oss"]
)
def test_experts_are_counted_that_a_token_meets(tmp_path: Path, family: str) -> None:
    """Those that it chose, the one that every token passes, and the router; dense layers as they are."""
    model = tiny_model(family, tmp_path).train()
    model.set_experts_implementation("eager")
    described = load_hf_config(tmp_path)
    assert products_of(model) == (
        training_flops(described, np.array([TOKENS])) - attention_of(described) - delta_rule_of(described)
    )


def test_a_layer_with_a_window_counts_what_it_sees(tmp_path: Path) -> None:
    tiny_model("gpt_oss", tmp_path, sliding_window=100)
    model, lengths = load_hf_config(tmp_path), np.array([4096, 60])
    for layer, window in enumerate((100, 10**9) * 2):
        seen = [np.minimum(np.arange(1, n + 1), window).sum() for n in lengths]
        np.testing.assert_allclose(model.pairs(layer, lengths), seen, rtol=0.02)
    longer = training_flops(model, np.array([8192])) - training_flops(model, np.array([4096]))
    by_half = 12 * model.heads * model.head_dim * (2 * 100 * 4096 + 2 * (8192**2 - 4096**2) / 2)
    assert longer == 6 * model.active_parameters * 4096 + by_half


def test_every_pass_over_a_sequence_counts(tmp_path: Path) -> None:
    tiny_model("qwen3_moe", tmp_path)
    described, lengths = load_hf_config(tmp_path), np.array([9, 4, 30])
    lora = LoraConfig(rank=8)
    once = training_flops(described, lengths, lora)
    assert training_flops(described, np.concatenate([lengths] * 3), lora) == pytest.approx(3 * once, rel=1e-12)
    assert once < training_flops(described, lengths)
