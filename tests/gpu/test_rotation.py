"""Rotary positions of packs on a GPU: the kernels against plain torch, values and gradients."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo.actor import runtime
from megatron_dppo.models.layers import latent_attention
from megatron_dppo.models.packed_logits import pack_params
from megatron_dppo.models.parallel import ParallelConfig
from tests.tiny import tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device and TransformerEngine"),
]

LENGTHS = [300, 17, 128, 1000, 1]
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
HEADS = {"num_attention_heads": 12, "num_key_value_heads": 12, "q_lora_rank": 128, "kv_lora_rank": 128} | {
    "qk_nope_head_dim": 128,  # published sizes of heads, which kernels of attention take
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def error(got: Tensor, right: Tensor) -> float:
    return float((got.double() - right.double()).norm() / right.double().norm())


@pytest.mark.parametrize("factor", [1.0, 1.3])
@pytest.mark.parametrize(("heads", "plain"), [(16, 128), (20, 192), (1, 0)], ids=["moonlight", "flash", "key"])
def test_the_kernel_rotates_like_torch(heads: int, plain: int, factor: float) -> None:
    torch.manual_seed(0)
    rows, size, device = sum(LENGTHS), plain + 64, torch.device("cuda")
    frequencies = 1e4 ** -(torch.arange(32) / 32)
    rotary = latent_attention.SharedRotary(frequencies, factor, SimpleNamespace(rank=lambda: 0, size=lambda: 1))
    rotary(rows, None, device)
    pack = pack_params(LENGTHS, device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        tables = rotary(rows, pack, device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    room = torch.randn(rows * heads * size + 4096, device=device).bfloat16()  # behind the heads too
    behind = room[rows * heads * size :].clone()
    states = room[: rows * heads * size].view(rows, 1, heads, size)
    exact = states.double().requires_grad_()
    right = latent_attention.rotate(exact, *tables)
    for _ in range(2):  # the first call tries several sizes of blocks
        given = states.clone().requires_grad_()
        got = latent_attention.rotate_in_one_launch(given * 1, *tables)
        grad = torch.randn_like(got)
        got.backward(grad.clone())
        (expected,) = torch.autograd.grad(right, exact, grad.double(), retain_graph=True)
        assert error(got, right) < 4e-3
        assert error(given.grad, expected) < 4e-3
    assert torch.equal(latent_attention.rotate_in_one_launch(states, *tables), got)
    assert torch.equal(room[rows * heads * size :], behind)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    monkeypatch.setattr(os, "environ", os.environ | ranks)
    try:
        yield runtime.start(ParallelConfig(), seed=0, timeout_minutes=1).groups
    finally:
        runtime.stop()


def attention(path: Path, groups: Any) -> tuple[Any, Any]:
    """The last layer's attention of a model with its weights, and the model."""
    from megatron_dppo.checkpoint.hf_import import load_hf_weights
    from megatron_dppo.models.build import build_model
    from megatron_dppo.models.hf_config import load_hf_config
    from megatron_dppo.models.megatron_config import transformer_config

    model = load_hf_config(path)
    options = {"params_dtype": torch.bfloat16, "gradient_accumulation_fusion": False}
    chunks = build_model(model, transformer_config(model, ParallelConfig(), **options), groups)
    load_hf_weights(chunks, model, groups)
    return chunks[0].decoder.layers[-1].self_attention, chunks[0]


def passes(layer: Any, gpt: Any) -> dict[str, Tensor]:
    """Output and gradients of a pack."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (sum(LENGTHS), 1, gpt.config.hidden_size)
    hidden, grad = (torch.randn(shape, generator=generator, device="cuda").bfloat16() for _ in range(2))
    hidden.requires_grad_()
    options = (
        {}
        if gpt.config.multi_latent_attention
        else {"rotary_pos_emb": gpt.rotary_pos_emb(max(LENGTHS), packed_seq=True)}
    )
    layer.zero_grad()
    out, _ = layer(hidden, None, packed_seq_params=pack_params(LENGTHS, hidden.device), **options)
    out.backward(grad)
    assert hidden.grad is not None
    found = {name: parameter.grad.clone() for name, parameter in layer.named_parameters() if parameter.grad is not None}
    return found | {"output": out.detach(), "hidden": hidden.grad}


def agree(got: dict[str, Tensor], right: dict[str, Tensor], limit: float) -> None:
    errors = {name: error(got[name], tensor) for name, tensor in right.items()}
    print({name: f"{off:.1e}" for name, off in errors.items()})
    assert len(errors) > 4
    assert max(errors.values()) < limit, errors


def test_a_factor_in_the_scale_is_one_in_the_rotation(tmp_path: Path, groups: Any) -> None:
    """gpt-oss in the fused kernel, against cosines and sines times the factor, sequence by sequence."""
    tiny_model("gpt_oss", tmp_path, num_hidden_layers=2)
    layer, gpt = attention(tmp_path, groups)
    assert layer.config.apply_rope_fusion
    fused, core = passes(layer, gpt), layer.core_attention
    layer.config.apply_rope_fusion = False
    layer._yarn_concentration_factor, core.scale = (core.scale * 32**0.5) ** 0.5, 32**-0.5
    assert layer._yarn_concentration_factor > 1.2
    agree(fused, passes(layer, gpt), 4e-2)  # a scale a tenth larger would be 7e-2 to 16e-2 off


@pytest.mark.parametrize("yarn", [{}, {"mscale": 1.0, "mscale_all_dim": 1.0}, {"mscale": 1.0, "mscale_all_dim": 0.2}])
def test_latent_attention_rotates_in_one_launch(
    yarn: dict[str, float], tmp_path: Path, groups: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"rope_scaling": YARN | yarn} if yarn else {}
    tiny_model("glm4_moe_lite", tmp_path, num_hidden_layers=2, **HEADS, **options)
    layer, gpt = attention(tmp_path, groups)
    assert (layer.rotary_pos_emb.factor != 1) == (yarn.get("mscale_all_dim") == 0.2)
    fused = passes(layer, gpt)
    monkeypatch.setattr(latent_attention, "rotate_in_one_launch", latent_attention.rotate)
    agree(fused, passes(layer, gpt), 1e-2)
