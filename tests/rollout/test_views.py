"""Weights that are copied straight into vLLM's parameters: to the bit those of a fresh load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.rollout.vllm import views
from tests.distributed import run_ranks
from tests.rollout.view_ranks import packed, synced
from tests.tiny import tiny_model

TIED: dict[str, Any] = {"mlp_only_layers": [0, 2], "tie_word_embeddings": True}
HALF: dict[str, Any] = {"dtype": torch.bfloat16}
UNEVEN: dict[str, Any] = {"num_experts": 7}
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {}),
    ("qwen3_moe", TIED),
    ("qwen3_moe", HALF),
    ("mixtral", {}),
    ("glm4_moe", {}),
    ("minimax_m2", {}),
    ("deepseek_v3", {}),
    ("glm4_moe_lite", {}),
    ("gpt_oss", {}),
    ("qwen3_next", {"linear_key_head_dim": 32, "linear_value_head_dim": 32}),
    ("qwen2", {}),
]


def folders_of(path: Path, family: str, **overrides: Any) -> tuple[Path, ...]:
    paths = tuple(path / str(number) for number in range(3))
    for seed, folder in enumerate(paths):
        tiny_model(family, folder, seed, **overrides)
    return paths


@pytest.mark.parametrize(("workers", "divided"), [(1, False), (2, False), (2, True)], ids=["TP1", "TP2", "TP2, EP2"])
def test_after_syncs_every_parameter_is_that_of_a_fresh_load(tmp_path: Path, workers: int, divided: bool) -> None:
    models = [*MODELS[:-1], ("qwen3_moe", UNEVEN)] if divided else MODELS
    folders = [folders_of(tmp_path / str(i), family, **overrides) for i, (family, overrides) in enumerate(models)]
    for rank, outcomes in enumerate(run_ranks(synced, workers, folders, workers, divided)):
        for model, outcome in zip(models, outcomes, strict=True):
            assert outcome.wrong == [], model
            # The files of gpt-oss hold a layer's experts as one tensor, which goes to all.
            assert (outcome.taken < 1) == (divided and model[0] != "gpt_oss"), model
            left = set()
            if model[0] == "gpt_oss" and rank > 0 and not divided:  # a bias is made zero there: no copy of what came
                left = {f"model.layers.{layer}.mlp.experts.routed_experts" for layer in range(4)}
            assert outcome.reloaded == left, model  # every other layer is loaded by views


def test_a_layer_whose_weights_vllm_permutes_is_left_to_it(tmp_path: Path) -> None:
    folders = [folders_of(tmp_path, "qwen3_moe")]
    (((outcome,)),) = run_ranks(synced, 1, folders, 1, False, True)
    assert outcome.wrong == []
    assert outcome.reloaded == {"model.layers.1.mlp.experts.routed_experts"}


def test_a_layer_that_computes_with_a_packed_copy_is_left_to_vllm(tmp_path: Path) -> None:
    """On a CPU these are all but norms and the embedding."""
    start, folder, _ = folders_of(tmp_path, "qwen3_moe", **TIED)
    (outcome,) = run_ranks(packed, 1, start, folder)
    assert outcome.wrong == []
    assert "model.layers.1.self_attn.qkv_proj" in outcome.reloaded
    assert not any("norm" in name for name in outcome.reloaded)


def test_what_was_written_is_counted_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every number once, but for padding that is zero, wherever a piece ends."""
    monkeypatch.setattr(views, "_PIECE", 5)
    tensor = torch.arange(1.0, 13.0).reshape(3, 4)
    left, right, row = (0, (3, 2), (4, 1)), (2, (3, 2), (4, 1)), (8, (1, 4), (4, 1))
    assert views.covered_once(tensor, [left, right])
    assert not views.covered_once(tensor, [left])
    assert not views.covered_once(tensor, [left, row, right])
    assert not views.covered_once(tensor, [left, row]), "as many numbers as all, some twice and some never"
    tensor[:2, 2:] = 0
    assert views.covered_once(tensor, [left, (10, (1, 2), (4, 1))])
    assert not views.covered_once(tensor.t(), [left, right])
