"""Adapters under the actor's layouts against transformers + PEFT in float64: logits, gradients, three steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.actor.conftest import World
from tests.actor.lora_ranks import TOKENS, TrainedAdapters, train_adapters
from tests.actor.matrix import (
    CLIP,
    EPSILON,
    FAMILIES,
    KIN,
    LAYOUTS,
    LR,
    NORMALISER,
    TEMPERATURE,
    UPDATES,
    Case,
    check_refusal,
    runs,
)
from tests.actor.reference import Reference, compare_metrics
from tests.distributed import run_ranks
from tests.peft_adapters import by_projection, with_peft, write_adapter

CASES = {
    "1 rank": Case("dppo-binary-tv"),
    "TP2": Case("dppo-binary-tv", recompute="full", recompute_layers=1),
    "EP2": Case("dppo-binary-tv", recompute="selective"),
    "TP2 EP2": Case("dppo-binary-tv", dispatcher="allgather"),
    "PP2": Case("dppo-binary-tv", recompute="full", dispatcher="allgather"),
    "TP2 ETP2": Case("dppo-binary-tv"),
    "TP2 PP2 EP2": Case("dppo-binary-tv", recompute="full"),
    "PP2 VPP2": Case("dppo-binary-tv"),
    "CP2": Case("dppo-binary-tv"),
    "DP2": Case("grpo-clip-higher", replay=False),
    "TP2 EP2 ETP2": Case("grpo-clip-higher", replay=False),
}
SEEDS = {"kimi_k2": 6}
"""Of adapters, where with the usual one a router's choice is too close to a tie."""
ONLY_IN_FULL = ("TP2 ETP2", "TP2 PP2 EP2", "PP2 VPP2", "CP2", "DP2", "TP2 EP2 ETP2")


@pytest.fixture(
    scope="module", params=["qwen3_moe", *(pytest.param(family, marks=pytest.mark.full) for family in FAMILIES + KIN)]
)
def world(request: pytest.FixtureRequest, worlds: Callable[[str], World]) -> World:
    return worlds(request.param)


@pytest.fixture(scope="module")
def adapter(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora") / "adapter"
    write_adapter(folder, world.model, seed=SEEDS.get(world.model.config.model_type, 5))
    return folder


@pytest.fixture(scope="module")
def expected(world: World, adapter: Path) -> Callable[[str, bool], tuple[list, dict[str, np.ndarray]]]:
    """(preset, replay) to the history of `Reference.train` and the adapters after it."""

    @functools.cache
    def train(preset: str, replay: bool) -> tuple[list, dict[str, np.ndarray]]:
        model = with_peft(world.model, adapter, trainable=True).get_base_model()
        lesson = world.lesson
        reference = Reference(model, lesson.batch, lesson.advantages, preset, NORMALISER, TEMPERATURE, replay)
        history = reference.train(lesson.updates, lr=LR, clip=CLIP, epsilon=EPSILON)
        return history, {name: p.detach().numpy() for name, p in model.named_parameters() if p.requires_grad}

    return train


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.full] if name in ONLY_IN_FULL else []) for name in CASES]
)
def test_three_steps_equal_peft(world: World, adapter: Path, expected: Callable, tmp_path: Path, layout: str) -> None:
    case, (ranks, sizes) = CASES[layout], LAYOUTS[layout]
    if not runs(world.model.config.model_type, layout):
        check_refusal(world.path, layout)
        return
    saved = tmp_path / "saved"
    results = run_ranks(train_adapters, ranks, str(world.path), sizes, world.lesson, case, adapter, saved)
    assert all(other.metrics == results[0].metrics for other in results)
    assert all(result.base_changed == [] for result in results)
    assert results[0].metrics[0]["policy/masked_fraction"] > 0.02

    got: TrainedAdapters = results[0]
    original = load_file(adapter / "adapter_model.safetensors")
    assert got.adapters[0].keys() == original.keys()
    for name, tensor in original.items():
        np.testing.assert_array_equal(got.adapters[0][name], tensor, err_msg=name)
    check_logits(world, adapter, sizes, results)

    history, after = expected(case.preset, case.replay)
    for metrics, steps in zip(got.metrics, (slice(0, 2), slice(2, 3)), strict=True):
        compare_metrics(metrics, history[steps], before=steps.start)
    assert len(got.gradients) == len(history) == sum(len(mini_batches) for mini_batches in UPDATES)
    for number, (gradients, step) in enumerate(zip(got.gradients, history, strict=True)):
        assert step.sensitivity < 2e-5, f"step {number} says nothing, a rounding moves its gradient"
        off = step.norm * max(2e-6, 2 * step.sensitivity)
        for name, gradient in gradients.items():
            right, where = by_projection(step.gradients, name), f"gradient {number} of {name}"
            np.testing.assert_allclose(gradient, right, atol=off, rtol=1e-5, err_msg=where)
    for name, tensor in got.adapters[1].items():
        np.testing.assert_allclose(tensor, by_projection(after, name), atol=2e-6, rtol=0, err_msg=name)
    still = [name for name in original if np.array_equal(got.adapters[1][name], got.adapters[0][name])]
    assert len(still) < len(original) // 10
    for name in still:  # an expert that no token chose
        assert all(not by_projection(step.gradients, name).any() for step in history), name

    written = load_file(saved / "adapter_model.safetensors")
    assert written.keys() == original.keys()
    for name, tensor in written.items():
        np.testing.assert_array_equal(tensor, got.adapters[1][name], err_msg=name)
    check_merged(world, got)


def check_logits(world: World, adapter: Path, sizes: dict, results: list[TrainedAdapters]) -> None:
    model = with_peft(world.model, adapter)
    with torch.no_grad():
        right = torch.cat([model(torch.tensor(tokens)[None]).logits[0] for tokens in TOKENS]).numpy()
    with_logits = [result.logits for result in results if result.logits is not None]
    if "context" in sizes:
        assert not with_logits
        return
    logits = np.concatenate(with_logits[: sizes.get("tensor", 1)], axis=-1)[:, : right.shape[1]]
    np.testing.assert_allclose(logits, right, atol=2e-5, rtol=0)


def check_merged(world: World, got: TrainedAdapters) -> None:
    """`W + scale B A` of each weight, made here in float64 of what was exported beside it."""
    from tests.actor.reference import by_hf_name
    from tests.peft_adapters import ALPHA, RANK

    state = {**dict(world.model.named_parameters()), **dict(world.model.named_buffers())}
    base = {name: tensor.detach().numpy() for name, tensor in state.items()}
    adapted = 0
    for name, tensor in got.merged.items():
        right = by_hf_name(base, name)
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{prefix}.lora_A.weight" in got.adapters[1]:
            a, b = (got.adapters[1][f"{prefix}.lora_{matrix}.weight"].astype(np.float64) for matrix in "AB")
            np.testing.assert_allclose(tensor, right + ALPHA / RANK * b @ a, atol=1e-6, rtol=0, err_msg=name)
            adapted += 1
        else:
            np.testing.assert_array_equal(tensor, right, err_msg=name)
    assert adapted == len(got.adapters[1]) // 2
