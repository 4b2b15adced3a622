"""Names, shapes and types of all tensors of two published checkpoints against what their config.json is read as.

The tables are of reports on the downloaded files in a public repository (DeepSeek-R1: 163 files, 91,991 tensors,
684,531,386,000 numbers; GLM-4.7-Flash: 48 files, 9,703 tensors, 31,221,488,576 numbers), written shorter: `{0-60}` are
the numbers from 0 to 60.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from math import prod

import pytest

from megatron_dppo.models.hf_config import resolve_hf_config
from tests.models.public_configs import CONFIGS, PARAMETERS

R1 = """
lm_head.weight 129280 7168
model.embed_tokens.weight 129280 7168
model.norm.weight 7168
model.layers.{0-61}.input_layernorm.weight 7168
model.layers.{0-61}.post_attention_layernorm.weight 7168
model.layers.{0-61}.self_attn.kv_a_layernorm.weight 512
model.layers.{0-61}.self_attn.kv_a_proj_with_mqa.weight 576 7168 blocks
model.layers.{0-61}.self_attn.kv_b_proj.weight 32768 512 blocks
model.layers.{0-61}.self_attn.o_proj.weight 7168 16384 blocks
model.layers.{0-61}.self_attn.q_a_layernorm.weight 1536
model.layers.{0-61}.self_attn.q_a_proj.weight 1536 7168 blocks
model.layers.{0-61}.self_attn.q_b_proj.weight 24576 1536 blocks
model.layers.{0-2}.mlp.down_proj.weight 7168 18432 blocks
model.layers.{0-2}.mlp.gate_proj.weight 18432 7168 blocks
model.layers.{0-2}.mlp.up_proj.weight 18432 7168 blocks
model.layers.{3-61}.mlp.experts.{0-255}.down_proj.weight 7168 2048 blocks
model.layers.{3-61}.mlp.experts.{0-255}.gate_proj.weight 2048 7168 blocks
model.layers.{3-61}.mlp.experts.{0-255}.up_proj.weight 2048 7168 blocks
model.layers.{3-61}.mlp.gate.e_score_correction_bias 256 float32
model.layers.{3-61}.mlp.gate.weight 256 7168
model.layers.{3-61}.mlp.shared_experts.down_proj.weight 7168 2048 blocks
model.layers.{3-61}.mlp.shared_experts.gate_proj.weight 2048 7168 blocks
model.layers.{3-61}.mlp.shared_experts.up_proj.weight 2048 7168 blocks
model.layers.61.eh_proj.weight 7168 14336
model.layers.61.embed_tokens.weight 129280 7168
model.layers.61.enorm.weight 7168
model.layers.61.hnorm.weight 7168
model.layers.61.shared_head.head.weight 129280 7168
model.layers.61.shared_head.norm.weight 7168
"""
FLASH = """
lm_head.weight 154880 2048
model.embed_tokens.weight 154880 2048
model.norm.weight 2048
model.layers.{0-47}.input_layernorm.weight 2048
model.layers.{0-47}.post_attention_layernorm.weight 2048
model.layers.{0-47}.self_attn.kv_a_layernorm.weight 512
model.layers.{0-47}.self_attn.kv_a_proj_with_mqa.weight 576 2048
model.layers.{0-47}.self_attn.kv_b_proj.weight 8960 512
model.layers.{0-47}.self_attn.o_proj.weight 2048 5120
model.layers.{0-47}.self_attn.q_a_layernorm.weight 768
model.layers.{0-47}.self_attn.q_a_proj.weight 768 2048
model.layers.{0-47}.self_attn.q_b_proj.weight 5120 768
model.layers.0.mlp.down_proj.weight 2048 10240
model.layers.0.mlp.gate_proj.weight 10240 2048
model.layers.0.mlp.up_proj.weight 10240 2048
model.layers.{1-47}.mlp.experts.{0-63}.down_proj.weight 2048 1536
model.layers.{1-47}.mlp.experts.{0-63}.gate_proj.weight 1536 2048
model.layers.{1-47}.mlp.experts.{0-63}.up_proj.weight 1536 2048
model.layers.{1-47}.mlp.gate.e_score_correction_bias 64 float32
model.layers.{1-47}.mlp.gate.weight 64 2048
model.layers.{1-47}.mlp.shared_experts.down_proj.weight 2048 1536
model.layers.{1-47}.mlp.shared_experts.gate_proj.weight 1536 2048
model.layers.{1-47}.mlp.shared_experts.up_proj.weight 1536 2048
model.layers.47.eh_proj.weight 2048 4096
model.layers.47.embed_tokens.weight 154880 2048
model.layers.47.enorm.weight 2048
model.layers.47.hnorm.weight 2048
model.layers.47.shared_head.head.weight 154880 2048
model.layers.47.shared_head.norm.weight 2048
"""
PUBLISHED = {
    "DeepSeek-V3": (R1, 91_991, 684_531_386_000),
    "GLM-4.7-Flash": (FLASH, 9_703, 31_221_488_576),
}


def expanded(table: str) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(name, shape, float32 | blocks | nothing) of every tensor but the scales."""
    for line in table.split("\n")[1:-1]:
        pattern, *rest = line.split()
        kind = rest.pop() if not rest[-1].isdigit() else ""
        bounds = re.findall(r"\{(\d+)-(\d+)\}", pattern)
        for numbers in itertools.product(*(range(int(first), int(last) + 1) for first, last in bounds)):
            yield re.sub(r"\{[^}]+\}", "{}", pattern).format(*numbers), tuple(map(int, rest)), kind


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_tensor_has_its_place(name: str) -> None:
    table, tensors, numbers = PUBLISHED[name]
    model, found = resolve_hf_config(CONFIGS[name]), list(expanded(table))
    scales = [prod(-(-size // 128) for size in shape) for _, shape, kind in found if kind == "blocks"]
    assert len(found) + len(scales) == tensors
    assert sum(prod(shape) for _, shape, _ in found) + sum(scales) == numbers

    trained = {tensor: shape for tensor, shape, _ in found if not model.carries(tensor)}
    assert trained == {tensor: tuple(shape) for tensor, shape in model.tensors.items()}
    assert {tensor for tensor, _, kind in found if kind == "float32" and tensor in trained} == model.float32_tensors
    biases = sum(prod(trained[tensor]) for tensor in model.float32_tensors)
    assert sum(map(prod, trained.values())) - biases == PARAMETERS[name]
