"""Weights that are drawn: the same under every layout, and whoever draws them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.checkpoint.hf_export import weight_exporter
from megatron_dppo.checkpoint.random_weights import fill_random, random_tensors
from megatron_dppo.models.hf_config import load_hf_config
from tests.distributed import run_ranks
from tests.megatron import build_from
from tests.tiny import tiny_model


def drawn_and_exported(rank: int, path: Path, layout: dict[str, Any]) -> int:
    """Fill the shards and put them together again; the tensors compared on rank 0, bit for bit."""
    models, model, groups = build_from(path, layout, load=False)
    fill_random(models, model, groups, seed=5)
    whole, compared = dict(random_tensors(model, 5, torch.device("cpu"))), 0
    for name, tensor in weight_exporter(models, model, groups).stream():
        if tensor is not None:
            assert torch.equal(tensor, whole[name].float()), name
            compared += 1
    return compared


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3_moe", {"tensor": 2, "expert": 2, "sequence_parallel": True}),
        ("gpt_oss", {"tensor": 2, "expert": 2, "sequence_parallel": True}),
        ("qwen2", {"pipeline": 2}),
    ],
)
def test_shards_hold_the_tensors_that_are_drawn_whole(family: str, layout: dict[str, Any], tmp_path: Path) -> None:
    tiny_model(family, tmp_path, num_hidden_layers=2)
    model = load_hf_config(tmp_path)
    assert run_ranks(drawn_and_exported, 2, tmp_path, layout) == [len(model.tensors), 0]


def test_what_is_drawn_is_what_a_checkpoint_would_hold(tmp_path: Path) -> None:
    tiny_model("qwen2", tmp_path, dtype=torch.bfloat16, initializer_range=0.5)
    model = load_hf_config(tmp_path)
    first, again, other = (dict(random_tensors(model, seed, torch.device("cpu"))) for seed in (1, 1, 2))
    assert first.keys() == model.tensors.keys()
    for name, tensor in first.items():
        assert (tuple(tensor.shape), tensor.dtype) == (model.tensors[name], torch.bfloat16)
        assert torch.equal(tensor, again[name])
        if "norm" in name:
            assert (tensor == 1).all()
            continue
        assert not torch.equal(tensor, other[name])
        if name.endswith(".bias"):
            assert tensor.float().std().item() == pytest.approx(0.5 * 64**0.5 / 4, rel=0.4)  # of 32 numbers
        else:
            assert tensor.float().std().item() == pytest.approx(0.5, rel=0.05)


SPREADS = {
    "q_proj.bias": 0.02 * 2,  # a quarter of sqrt(64)
    "k_proj.bias": 0.02 * 2,
    "v_proj.bias": 0.02 * 2,
    "o_proj.bias": 0.02,
    "router.bias": 0.02 * 2,
    "gate_up_proj_bias": 0.02 * 2,
    "down_proj_bias": 0.02,
    "sinks": 1.0,
    "e_score_correction_bias": 0.02,
}


@pytest.mark.parametrize(
    ("family", "names"),
    [("gpt_oss", set(SPREADS) - {"e_score_correction_bias"})]
    + [("glm4_moe", {"q_proj.bias", "k_proj.bias", "v_proj.bias", "e_score_correction_bias"})]
    + [(name, {"e_score_correction_bias"}) for name in ("minimax_m2", "deepseek_v3", "kimi_k2", "glm4_moe_lite")],
)
def test_biases_and_sinks_are_seen(family: str, names: set[str], tmp_path: Path) -> None:
    """None is zero, so that a run shows one that is not applied; none outweighs what it is added to. By families that
    have them, of all layers together."""
    tiny_model(family, tmp_path, num_hidden_layers=8, dtype=torch.float32)
    model = load_hf_config(tmp_path)
    found: dict[str, list[torch.Tensor]] = {}
    for name, tensor in random_tensors(model, 1, torch.device("cpu")):
        if "bias" in name or "sinks" in name:
            kind = next(kind for kind in SPREADS if name.endswith(kind))
            found.setdefault(kind, []).append(tensor.flatten())
            assert (tensor != 0).all()
    assert found.keys() == names
    for kind, tensors in found.items():
        assert torch.cat(tensors).std().item() == pytest.approx(SPREADS[kind], rel=0.35), kind


def test_norms_that_add_one_begin_at_nothing(tmp_path: Path) -> None:
    """All of Qwen3-Next's but that behind a delta rule."""
    tiny_model("qwen3_next", tmp_path, num_hidden_layers=2)
    drawn = dict(random_tensors(load_hf_config(tmp_path), 1, torch.device("cpu")))
    norms = {name: tensor for name, tensor in drawn.items() if "norm" in name}
    assert {name for name, tensor in norms.items() if (tensor == 1).all()} == {"model.layers.0.linear_attn.norm.weight"}
    assert sum(bool((tensor == 0).all()) for tensor in norms.values()) == len(norms) - 1
