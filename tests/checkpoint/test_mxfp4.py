"""Experts in 4 bits with a scale for every 32 numbers: what transformers makes of them, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron_dppo.checkpoint.convert import convert_command as convert
from megatron_dppo.checkpoint.quantized import Mxfp4Files
from megatron_dppo.errors import UserError
from megatron_dppo.models.hf_config import load_hf_config
from tests.checkpoint.test_block_scaled import check_refused, check_scheme_refused
from tests.tiny import tiny_model

SCHEME = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}
CODES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def packed(experts: int, inputs: int, outputs: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random blocks, every code among them, and scales from 2^-9 to 2^2."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(118, 130, (experts, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
    return blocks, scales


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    tiny_model("gpt_oss", path, num_hidden_layers=2, dtype=torch.bfloat16)
    return path


def in_4_bits(folder: Path) -> dict[str, torch.Tensor]:
    """Store a folder's experts so, and return what transformers makes of them."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    expected = dict(tensors)
    for seed, name in enumerate([name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]):
        blocks, scales = packed(*tensors.pop(name).shape, seed)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": SCHEME}))
    return expected


def test_a_folder_becomes_plain(folder: Path, tmp_path: Path) -> None:
    expected = in_4_bits(folder)
    with pytest.raises(UserError, match=r"quantization_config is set.*megatron-dppo convert"):
        load_hf_config(folder)
    convert(folder, tmp_path / "plain", verify=True)
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    assert plain.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(plain[name], tensor), name
    assert load_hf_config(tmp_path / "plain").sinks


def test_any_block_is_read_by_the_definition(tmp_path: Path) -> None:
    blocks, scales = packed(3, 96, 20, seed=1)
    scales[0, 0] = torch.tensor([0, 1, 254])  # the ends of the exponents
    save_file({"x_blocks": blocks, "x_scales": scales}, tmp_path / "model.safetensors")
    whole = torch.empty(3, 96, 20, dtype=torch.float64)
    for index, byte in enumerate(blocks.flatten().tolist()):
        row, half = divmod(index, 16)
        place, group = divmod(row, 3)
        expert, output = divmod(place, 20)
        factor = 2.0 ** (int(scales[expert, output, group]) - 127)
        whole[expert, 32 * group + 2 * half, output] = CODES[byte % 16] * factor
        whole[expert, 32 * group + 2 * half + 1, output] = CODES[byte // 16] * factor
    plain = whole.to(torch.bfloat16)
    assert (plain.double() == whole)[plain.isfinite()].all(), "every number of the format is one of bfloat16"
    files = Mxfp4Files(tmp_path)
    assert (set(files.tensors), files.tensors["x"].shape) == ({"x"}, (3, 96, 20))
    everything = ((0, 3), (0, 96), (0, 20))
    for block in (everything, ((1, 2), (0, 96), (1, 20, 2)), ((0, 1), (31, 65), (3, 4)), ((2, 3), (5, 7), (0, 20))):
        assert torch.equal(files.read("x", block), plain[tuple(slice(*span) for span in block)]), block


def _first(tensors: dict[str, torch.Tensor], end: str) -> str:
    return min(name for name in tensors if name.endswith(end))


def _without_scales(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[_first(tensors, "down_proj_scales")]


def _without_blocks(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[_first(tensors, "down_proj_blocks")]


def _fewer_scales(tensors: dict[str, torch.Tensor]) -> None:
    name = _first(tensors, "down_proj_scales")
    tensors[name] = tensors[name][:, :1].contiguous()


def _as_one(tensors: dict[str, torch.Tensor]) -> None:
    name = _first(tensors, "down_proj_blocks")
    tensors[name] = tensors[name].flatten(-2)


def _not_a_number(tensors: dict[str, torch.Tensor]) -> None:
    tensors[_first(tensors, "down_proj_scales")][0, 0, 0] = 255


def _bytes(tensors: dict[str, torch.Tensor]) -> None:
    name = _first(tensors, "q_proj.weight")
    tensors[name] = tensors[name].to(torch.uint8)


def _others(tensors: dict[str, torch.Tensor]) -> None:
    for end in ("down_proj_blocks", "down_proj_scales"):
        name = _first(tensors, end)
        tensors[name] = tensors[name][:2].contiguous()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_without_scales, "down_proj_blocks is without .*down_proj_scales"),
        (_without_blocks, "down_proj_scales belongs to no .*down_proj_blocks"),
        (_fewer_scales, r"down_proj_scales is uint8 \(8, 1, 1\) for blocks \(8, 64, 1, 16\)"),
        (_as_one, r"down_proj_blocks is uint8 \(8, 64, 16\); only"),
        (_not_a_number, r"down_proj_scales has one that is not a number \(255\)"),
        (_bytes, "q_proj.weight is stored as U8"),
        (_others, r"down_proj.*\(2, 32, 64\)"),
    ],
)
def test_other_tensors_are_refused(folder: Path, tmp_path: Path, change: Callable[..., None], named: str) -> None:
    in_4_bits(folder)
    check_refused(folder, tmp_path / "plain", change, named)


@pytest.mark.parametrize(
    ("scheme", "named"),
    [
        (SCHEME | {"quant_method": "gptq"}, r"quantization_config.quant_method is 'gptq', only fp8 .* and mxfp4 "),
        (SCHEME | {"group_size": 64}, "quantization_config.group_size is not known"),
    ],
)
def test_other_schemes_are_refused(folder: Path, tmp_path: Path, scheme: dict, named: str) -> None:
    check_scheme_refused(folder, tmp_path / "plain", scheme, named)
