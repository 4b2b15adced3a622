"""Low precision: gradients near float32's, one loss scale that follows overflows, a float32 router."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.actor.matrix import LAYOUTS, SHAPE, TEMPERATURE, Case, advantages, build_actor
from tests.distributed import run_ranks
from tests.tiny import tiny_qwen3_moe

FEW = SHAPE | {"groups": 2}
ADVANTAGES = advantages()[: FEW["groups"] * FEW["samples"]]
PRECISIONS = ["float32", "bfloat16", "float16"]


def updates(rank: int, path: str, layout: dict, batch: Any, runs: list[tuple[str, dict, int]]) -> list[list[dict]]:
    """Metrics of a number of updates for every (dtype, optimizer settings, number)."""
    from megatron.core import parallel_state

    from megatron_dppo.actor.actor import TrainingSignal
    from megatron_dppo.batch import InMemorySource

    found = []
    for dtype, settings, number in runs:
        actor = build_actor(path, layout, Case(), dtype=dtype, **settings)
        signal = TrainingSignal(ADVANTAGES, ADVANTAGES, [np.arange(len(ADVANTAGES))])
        found.append([actor.update(InMemorySource.of(batch), signal).metrics for _ in range(number)])
        parallel_state.destroy_model_parallel()
    return found


@pytest.fixture(scope="module")
def problem(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    from tests.actor.reference import make_rollout

    path = tmp_path_factory.mktemp("model")
    return str(path), make_rollout(tiny_qwen3_moe(path, seed=3), seed=4, temperature=TEMPERATURE, **FEW)


def test_low_precision_and_its_loss_scale(problem: tuple[str, Any]) -> None:
    """Experts and dense parameters have optimizers of their own under TP2 EP2, but one scale."""
    huge, impossible = {"initial_loss_scale": 2.0**22}, {"initial_loss_scale": 2.0**40, "min_loss_scale": 2.0**39}
    growing = {"initial_loss_scale": 1024.0, "loss_scale_window": 2}
    ranks, layout = LAYOUTS["TP2 EP2"]
    runs: list[tuple[str, dict, int]] = [(dtype, {"initial_loss_scale": 1024.0}, 2) for dtype in PRECISIONS]
    runs += [("float16", huge, 9), ("float16", growing, 5), ("float16", impossible | {"loss_scale_hysteresis": 2}, 3)]
    results = run_ranks(updates, ranks, problem[0], layout, problem[1], runs)
    np.testing.assert_equal(results[0], results[1], "ranks disagree")
    exact, brain, half, from_huge, grown, floored = results[0]

    for name, metrics, tolerance in (("bfloat16", brain, 0.12), ("float16", half, 0.02)):
        for step, reference in zip(metrics, exact, strict=True):
            for key in ("optimizer/loss", "optimizer/grad_norm"):
                assert step[key] == pytest.approx(reference[key], rel=tolerance, abs=0.1 * tolerance), (name, key)
            assert step["optimizer/skipped_steps"] == 0
        assert metrics[0]["optimizer/loss"] != metrics[1]["optimizer/loss"]
    assert [m["optimizer/loss_scale"] for m in (*exact, *brain, *half)] == [1.0] * 4 + [1024.0] * 2

    skipped = [m["optimizer/overflowed_steps"] for m in from_huge]
    scales = [m["optimizer/loss_scale"] for m in from_huge]
    overflows = int(sum(skipped))
    assert skipped == [1.0] * overflows + [0.0] * (9 - overflows), "overflows come first, then none"
    assert 3 < overflows < 9, "more than actor.max_skipped_steps allows other steps to be skipped"
    assert scales[: overflows + 1] == [2.0 ** (22 - n) for n in range(overflows + 1)]
    assert np.isnan(from_huge[0]["optimizer/grad_norm"])
    assert from_huge[overflows]["optimizer/loss"] == from_huge[0]["optimizer/loss"], "a skipped step changes nothing"
    assert from_huge[overflows]["optimizer/grad_norm"] == pytest.approx(half[0]["optimizer/grad_norm"], rel=1e-2)

    assert [m["optimizer/loss_scale"] for m in grown] == [1024.0, 1024.0, 2048.0, 2048.0, 4096.0]
    assert [m["optimizer/loss_scale"] for m in floored] == [2.0**40, 2.0**40, 2.0**39]
    assert [m["optimizer/overflowed_steps"] for m in floored] == [1.0, 1.0, 0.0], "nothing is left to lower"
    assert [m["optimizer/skipped_steps"] for m in floored] == [1.0] * 3


def router_types(rank: int, path: str) -> dict[str, Any]:
    """What the router of a bfloat16 model computes in."""
    from tests.megatron import build_from

    models, _, _ = build_from(path, {}, params_dtype=torch.bfloat16)
    seen: dict[str, Any] = {}
    router = models[0].decoder.layers[0].mlp.router
    router.register_forward_hook(lambda module, args, out: seen.update(hidden=args[0].dtype, probs=out[0].dtype))
    ids = torch.arange(1, 9)[None]
    hidden = torch.randn(8, 1, router.config.hidden_size, dtype=torch.bfloat16)
    logits = router.gating(hidden)
    models[0](ids, torch.arange(8)[None], None)
    exact = hidden.view(8, -1).float() @ router.weight.float().t()
    rounded = (hidden.view(8, -1) @ router.weight.t()).float()
    error = (logits.view(8, -1) - exact).abs().max().item(), (rounded - exact).abs().max().item()
    return seen | {"logits": logits.dtype, "weight": router.weight.dtype, "error": error}


def test_the_router_computes_in_float32(problem: tuple[str, Any]) -> None:
    (found,) = run_ranks(router_types, 1, problem[0])
    assert (found["hidden"], found["weight"]) == (torch.bfloat16, torch.bfloat16)
    assert (found["logits"], found["probs"]) == (torch.float32, torch.float32)
    float32_error, bfloat16_error = found["error"]
    assert float32_error < 1e-5 < bfloat16_error
