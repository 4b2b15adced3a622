"""Weights that are copied straight into vLLM's parameters: to the bit those of a fresh load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_dppo.checkpoint.weight_layout import BucketLayout, TensorSlot
from megatron_dppo.rollout.vllm import views
from tests.distributed import run_ranks
from tests.rollout.view_ranks import in_turn, packed, synced
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


@pytest.fixture(scope="module")
def one_worker(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Outcomes of all models, of one whose experts vLLM permutes, and of one on a CPU."""
    path = tmp_path_factory.mktemp("one")
    models = [folders_of(path / str(i), family, **overrides) for i, (family, overrides) in enumerate(MODELS)]
    first, tied = models[0], models[1]
    calls = [(synced, (models, 1, False)), (synced, ([first], 1, False, "swapped")), (packed, tied[:2])]
    (found,) = run_ranks(in_turn, 1, calls)
    return found


def check(models: list[tuple[str, Any]], outcomes: list[Any], *, rank: int, workers: int, divided: bool) -> None:
    for model, outcome in zip(models, outcomes, strict=True):
        assert outcome.wrong == [], model
        # The files of gpt-oss hold a layer's experts as one tensor, which goes to all who have a slice of each.
        whole = workers == 1 or model[0] == "qwen2" or (model[0] == "gpt_oss" and not divided)
        assert (outcome.taken < 1) != whole, model
        left = set()
        if model[0] == "gpt_oss" and rank > 0 and not divided:  # a bias is made zero there: no copy of what came
            left = {f"model.layers.{layer}.mlp.experts.routed_experts" for layer in range(4)}
        assert outcome.reloaded == left, model  # every other layer is loaded by views


def test_after_syncs_every_parameter_is_that_of_a_fresh_load(one_worker: list[Any]) -> None:
    check(MODELS, one_worker[0], rank=0, workers=1, divided=False)


def test_so_it_is_on_two_workers_that_get_slices_of_experts_or_their_own(tmp_path: Path) -> None:
    models = [*MODELS, ("qwen3_moe", UNEVEN)]
    folders = [folders_of(tmp_path / str(i), family, **overrides) for i, (family, overrides) in enumerate(models)]
    with_experts, dense = [*range(len(MODELS) - 1), len(MODELS)], len(MODELS) - 1
    assert models[dense][0] == "qwen2"
    calls: list[Any] = [(synced, (folders[:-1], 2, False)), (synced, ([folders[n] for n in with_experts], 2, True))]
    calls += [(synced, (folders[:1], 2, False, way)) for way in ("swapped", "padded")]
    for rank, (whole, divided, swapped, padded) in enumerate(run_ranks(in_turn, 2, calls)):
        assert swapped[0].wrong == [], "slices that vLLM's loaders took"
        assert swapped[0].reloaded == {"model.layers.1.mlp.experts.routed_experts"}
        assert len(padded[0].reloaded) > 1
        assert (padded[0].wrong, padded[0].held) == ([], set()), "with padding a layer is whole before the sync ends"
        check(MODELS, whole, rank=rank, workers=2, divided=False)
        check([models[n] for n in with_experts], divided, rank=rank, workers=2, divided=True)


def test_a_layer_whose_weights_vllm_permutes_is_left_to_it(one_worker: list[Any]) -> None:
    (outcome,) = one_worker[1]
    assert outcome.wrong == []
    assert outcome.reloaded == {"model.layers.1.mlp.experts.routed_experts"}


def test_a_layer_that_computes_with_a_packed_copy_is_left_to_vllm(one_worker: list[Any]) -> None:
    """On a CPU these are all but norms and the embedding."""
    outcome = one_worker[2]
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


def test_a_worker_that_loads_other_numbers_than_it_gets_says_what_helps() -> None:
    """Rows 0 to 4 of 8 come to it: of the whole expert its rows lie where they begin, and those behind are refused."""
    slot = TensorSlot("e.{expert}.w", "float32", (8, 6), 0, (((0, 4), (0, 6)),), (0, 2))
    target = torch.empty(2, 2, 6)
    plan = views._plan([slot], {slot.name: [views.View(12, (2, 2, 6), (48, 6, 1), target)]}, lambda _: [(0, 0, 2)])
    ((dtype, offset, _, stride),) = plan.sources
    assert (dtype, offset, stride) == (torch.int64, 6, (12, 3, 1)), "two float32 at once: 12, and experts of 24 numbers"
    for outside in (views.View(24, (2, 2, 6), (48, 6, 1), target), views.View(12, (2, 2, 6), (48, 1, 8), target)):
        with pytest.raises(RuntimeError, match=r"rows \(0, 4\) .* rollout.weight_transfer=object_store"):
            views._plan([slot], {slot.name: [outside]}, lambda _: [(0, 0, 2)])


class Loaded(torch.nn.Module):
    """A model that looks, when a bucket comes, how many of the tensors before it are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.before: list[StorageWeakRef] = []
        self.there: list[int] = []

    def load_weights(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        self.there.append(sum(not storage.expired() for storage in self.before))
        self.before += [StorageWeakRef(tensor.untyped_storage()) for _, tensor in tensors]


def test_a_trial_load_has_the_dense_tensors_of_one_bucket() -> None:
    layouts = [
        BucketLayout(tuple(TensorSlot(f"{bucket}.{n}", "bfloat16", (4, 4), 64 * n) for n in range(2)), (), 128)
        for bucket in range(3)
    ]
    model = Loaded()
    views.TrialLoad(model, layouts, torch.device("cpu"), lambda slot: None).load(lambda slot, tensor: None)
    assert model.there == [0, 0, 0]
