"""Names, shapes and types of all tensors of three published checkpoints against what their config.json is read as.

The tables are of reports on the downloaded files in public repositories (DeepSeek-R1: 163 files, 91,991 tensors,
684,531,386,000 numbers; GLM-4.7-Flash: 48 files, 9,703 tensors, 31,221,488,576 numbers; Qwen3.5-397B-A17B: headers of
94 files, 1,038 tensors of the decoder, of 396,346,350,336 numbers, 45 x 2 of them float32, and 456,010,480 numbers of
what sees images, the further layer left out here), written shorter: `{0-60}` are the numbers from 0 to 60.
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
QWEN = """
lm_head.weight 248320 4096
model.language_model.embed_tokens.weight 248320 4096
model.language_model.norm.weight 4096
model.language_model.layers.{0-59}.input_layernorm.weight 4096
model.language_model.layers.{0-59}.post_attention_layernorm.weight 4096
model.language_model.layers.{0-59}.mlp.experts.gate_up_proj 512 2048 4096
model.language_model.layers.{0-59}.mlp.experts.down_proj 512 4096 1024
model.language_model.layers.{0-59}.mlp.gate.weight 512 4096
model.language_model.layers.{0-59}.mlp.shared_expert.gate_proj.weight 1024 4096
model.language_model.layers.{0-59}.mlp.shared_expert.up_proj.weight 1024 4096
model.language_model.layers.{0-59}.mlp.shared_expert.down_proj.weight 4096 1024
model.language_model.layers.{0-59}.mlp.shared_expert_gate.weight 1 4096
LINEAR.linear_attn.A_log 64
LINEAR.linear_attn.dt_bias 64
LINEAR.linear_attn.conv1d.weight 12288 1 4
LINEAR.linear_attn.in_proj_qkv.weight 12288 4096
LINEAR.linear_attn.in_proj_z.weight 8192 4096
LINEAR.linear_attn.in_proj_b.weight 64 4096
LINEAR.linear_attn.in_proj_a.weight 64 4096
LINEAR.linear_attn.norm.weight 128
LINEAR.linear_attn.out_proj.weight 4096 8192
FULL.self_attn.q_proj.weight 16384 4096
FULL.self_attn.k_proj.weight 512 4096
FULL.self_attn.v_proj.weight 512 4096
FULL.self_attn.o_proj.weight 4096 8192
FULL.self_attn.q_norm.weight 256
FULL.self_attn.k_norm.weight 256
model.visual.patch_embed.proj.weight 1152 3 2 16 16
model.visual.patch_embed.proj.bias 1152
model.visual.pos_embed.weight 2304 1152
model.visual.blocks.{0-26}.norm1.weight 1152
model.visual.blocks.{0-26}.norm1.bias 1152
model.visual.blocks.{0-26}.norm2.weight 1152
model.visual.blocks.{0-26}.norm2.bias 1152
model.visual.blocks.{0-26}.attn.qkv.weight 3456 1152
model.visual.blocks.{0-26}.attn.qkv.bias 3456
model.visual.blocks.{0-26}.attn.proj.weight 1152 1152
model.visual.blocks.{0-26}.attn.proj.bias 1152
model.visual.blocks.{0-26}.mlp.linear_fc1.weight 4304 1152
model.visual.blocks.{0-26}.mlp.linear_fc1.bias 4304
model.visual.blocks.{0-26}.mlp.linear_fc2.weight 1152 4304
model.visual.blocks.{0-26}.mlp.linear_fc2.bias 1152
model.visual.merger.norm.weight 1152
model.visual.merger.norm.bias 1152
model.visual.merger.linear_fc1.weight 4608 4608
model.visual.merger.linear_fc1.bias 4608
model.visual.merger.linear_fc2.weight 4096 4608
model.visual.merger.linear_fc2.bias 4096
"""
KINDS = {"LINEAR": [n for n in range(60) if n % 4 != 3], "FULL": range(3, 60, 4)}
"""Of QWEN's layers."""
PUBLISHED = {
    "Qwen3.5-397B-A17B": (QWEN, 1_038 + 333, 396_346_350_336 + 456_010_480),
    "DeepSeek-V3": (R1, 91_991, 684_531_386_000),
    "GLM-4.7-Flash": (FLASH, 9_703, 31_221_488_576),
}


def expanded(table: str) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(name, shape, float32 | blocks | nothing) of every tensor but the scales."""
    lines = table.split("\n")[1:-1]
    for kind, layers in KINDS.items():
        each = [(line, layers if line.startswith(kind) else [0]) for line in lines]
        lines = [line.replace(kind, f"model.language_model.layers.{n}", 1) for line, numbers in each for n in numbers]
    for line in lines:
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
    held = model.stacked_tensors if model.family.writes_stacked else model.tensors
    assert trained == {tensor: tuple(shape) for tensor, shape in held.items()}
    assert {tensor for tensor, _, kind in found if kind == "float32" and tensor in trained} == model.float32_tensors
    biases = sum(prod(trained[tensor]) for tensor in model.float32_tensors)
    assert sum(map(prod, trained.values())) - biases == PARAMETERS[name]
