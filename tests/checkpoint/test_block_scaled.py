"""Weights in 8 bits with a scale for each block of 128 x 128: read by their definition, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dppo.checkpoint.convert import convert_command as convert
from megatron_dppo.checkpoint.quantized import BlockScaledFiles
from megatron_dppo.errors import UserError
from megatron_dppo.models.hf_config import load_hf_config
from tests.tiny import tiny_model

SCHEME = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
FP8 = torch.float8_e4m3fn


def by_definition(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Block by block."""
    result = torch.empty(weight.shape, dtype=torch.bfloat16)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            place = slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1))
            result[place] = (weight.to(torch.float32)[place] * scale[i, j]).to(torch.bfloat16)
    return result


def in_8_bits(folder: Path) -> dict[str, torch.Tensor]:
    """Store the matrices of a folder's layers so, those after the last one too, and return what they stand for."""
    file = folder / "model.safetensors"
    tensors, generator = load_file(file), torch.Generator().manual_seed(1)
    expected = dict(tensors)
    for name, tensor in list(tensors.items()):
        if ".layers." in name and tensor.ndim == 2 and not name.endswith("gate.weight"):
            weight = (50 * torch.randn(tensor.shape, generator=generator)).to(FP8)
            scale = 1e-3 * torch.rand([-(-n // 128) for n in tensor.shape], generator=generator)
            tensors |= {name: weight, f"{name}_scale_inv": scale}
            expected[name] = by_definition(weight, scale)
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": SCHEME}))
    return expected


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose sizes are no multiples of 128, and a layer after its last."""
    path = tmp_path / "model"
    tiny_model("deepseek_v3", path, hidden_size=192, num_hidden_layers=2, intermediate_size=160, dtype=torch.bfloat16)
    further = {"model.layers.2.eh_proj.weight": torch.ones(192, 384, dtype=torch.bfloat16)}
    save_file(load_file(path / "model.safetensors") | further, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_a_folder_becomes_plain(folder: Path, tmp_path: Path) -> None:
    expected = in_8_bits(folder)
    with pytest.raises(UserError, match=r"quantization_config is set.*megatron-dppo convert"):
        load_hf_config(folder)
    convert(folder, tmp_path / "plain", verify=True)
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    assert plain.keys() == expected.keys()
    assert "model.layers.2.eh_proj.weight" in plain
    for name, tensor in expected.items():
        assert torch.equal(plain[name], tensor), name
    assert load_hf_config(tmp_path / "plain").latent is not None
    convert(folder, tmp_path / "state", to="state")
    convert(tmp_path / "state", tmp_path / "again")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "plain/model.safetensors").read_bytes()


def test_any_block_is_read(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(2)
    weight = (50 * torch.randn(576, 300, generator=generator)).to(FP8)
    scale = torch.rand(5, 3, generator=generator)
    save_file({"x.weight": weight, "x.weight_scale_inv": scale}, tmp_path / "model.safetensors")
    files, whole = BlockScaledFiles(tmp_path), by_definition(weight, scale)
    assert (set(files.tensors), files.tensors["x.weight"].dtype) == ({"x.weight"}, torch.bfloat16)
    for rows, columns in (
        ((0, 576), (0, 300)),
        ((100, 131), (127, 129)),
        ((512, 576), (256, 300)),
        ((128, 256), (5, 6)),
    ):
        assert torch.equal(files.read("x.weight", (rows, columns)), whole[slice(*rows), slice(*columns)])


def _without_scale(tensors: dict[str, Any]) -> None:
    del tensors[next(name for name in tensors if name.endswith("kv_b_proj.weight_scale_inv"))]


def _without_weight(tensors: dict[str, Any]) -> None:
    name = next(name for name in tensors if name.endswith("kv_b_proj.weight"))
    tensors[name] = tensors[name].to(torch.bfloat16)


def _halved(tensors: dict[str, Any]) -> None:
    name = next(name for name in tensors if name.endswith("kv_b_proj.weight_scale_inv"))
    tensors[name] = tensors[name].to(torch.bfloat16)


def _fewer(tensors: dict[str, Any]) -> None:
    name = next(name for name in tensors if name.endswith("kv_b_proj.weight_scale_inv"))
    tensors[name] = tensors[name][:1].contiguous()


def _other_type(tensors: dict[str, Any]) -> None:
    name = next(name for name in tensors if name.endswith("kv_b_proj.weight"))
    tensors[name] = tensors[name].float().to(torch.float8_e5m2)


def check_refused(folder: Path, out: Path, change: Callable[..., None], named: str) -> None:
    """After a `change` of its tensors the folder is not converted, and one line says why."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=named) as refusal:
        convert(folder, out)
    assert "\n" not in str(refusal.value)
    assert not out.exists()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_without_scale, "in 8 bits without .*kv_b_proj.weight_scale_inv"),
        (_without_weight, "kv_b_proj.weight_scale_inv belongs to no 8-bit tensor"),
        (_halved, "kv_b_proj.weight_scale_inv is bfloat16"),
        (_fewer, r"kv_b_proj.weight_scale_inv is float32 \(1, 1\)"),
        (_other_type, "kv_b_proj.weight is stored as F8_E5M2"),
    ],
)
def test_other_tensors_are_refused(folder: Path, tmp_path: Path, change: Callable[..., None], named: str) -> None:
    in_8_bits(folder)
    check_refused(folder, tmp_path / "plain", change, named)


def check_scheme_refused(folder: Path, out: Path, scheme: Any, named: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": scheme}))
    with pytest.raises(UserError, match=named):
        convert(folder, out)


@pytest.mark.parametrize(
    ("scheme", "named"),
    [
        (SCHEME | {"quant_method": "gptq"}, "quantization_config.quant_method is 'gptq'"),
        (SCHEME | {"weight_block_size": [64, 64]}, "quantization_config.weight_block_size"),
        (SCHEME | {"quant_method": ["fp8"]}, r"quantization_config.quant_method is \['fp8'\]"),
        (SCHEME | {"fmt": "e5m2"}, "quantization_config.fmt"),
        ({"quant_method": "fp8"}, "quantization_config.weight_block_size is None"),
        (SCHEME | {"store": "packed"}, "quantization_config.store"),
        ("fp8", "quantization_config is 'fp8'"),
    ],
)
def test_other_schemes_are_refused(folder: Path, tmp_path: Path, scheme: Any, named: str) -> None:
    check_scheme_refused(folder, tmp_path / "plain", scheme, named)
