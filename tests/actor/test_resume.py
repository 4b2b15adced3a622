"""Eight gradient steps are four, a saved state, and four more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dppo.trainer.resume import placed
from tests.actor.conftest import World
from tests.actor.matrix import LAYOUTS, Case, Lesson, build_actor, exported
from tests.distributed import run_ranks

SCHEDULE = {"lr": 2e-3, "schedule": "cosine", "warmup_steps": 3, "decay_steps": 12, "min_lr": 1e-5}
MINI_BATCHES = [np.arange(first, first + 6) for first in (0, 3, 6, 2, 5, 1, 4, 0)]


def train_eight(
    rank: int, path: str, layout: dict, lesson: Lesson, root: Path, estimator: str, first: int, stop: int
) -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
    """Gradient steps `first .. stop - 1`; from a saved state unless first is 0; saved at the fourth. The metrics of
    each, and the weights (rank 0)."""
    from megatron_dppo.actor.actor import TrainingSignal
    from megatron_dppo.algorithm import KLEstimator, KLPlace, ReferenceKL
    from megatron_dppo.batch import InMemorySource
    from megatron_dppo.checkpoint.training_state import TrainingStates

    # With a KL to the weights that the first run began with, which are not those of the state.
    kl = ReferenceKL(coefficient=0.05, estimator=KLEstimator(estimator), place=KLPlace.LOSS)
    actor = build_actor(path, layout, Case("dppo-binary-tv"), reference_kl=kl, **SCHEDULE)
    states = TrainingStates(root, actor.trainee)
    if first:
        for chunk in actor.chunks:
            for parameter in chunk.parameters():
                parameter.data.fill_(7.0)
        assert states.load().step == first
    metrics = []
    for number in range(first, stop):
        signal = TrainingSignal(lesson.advantages, lesson.advantages, [MINI_BATCHES[number]])
        metrics.append(actor.update(InMemorySource.of(lesson.batch), signal).metrics)
        if number + 1 == 4:
            states.save(4, {})
    return metrics, exported(actor)


def cosine(step: int) -> float:
    """The rate of gradient step `step` (from 0): linear from 0 in three steps, then half a cosine until the twelfth."""
    if step <= 3:
        return 2e-3 * step / 3
    return 1e-5 + (2e-3 - 1e-5) * 0.5 * (1 + np.cos(np.pi * (step - 3) / 9))


@pytest.mark.parametrize(
    ("first", "others", "estimator"),
    [("TP2 EP2", ["TP2 EP2", "1 rank"], "topk"), ("DP2", ["PP2 VPP2"], "k2")],
    ids=["TP2 EP2", "DP2"],
)
def test_eight_steps_are_four_and_four(
    world: World, tmp_path: Path, first: str, others: list[str], estimator: str
) -> None:
    """Under the layout that saved the state, to the bit, and under others."""
    check_resumed(world, tmp_path, first, others, estimator)


def test_biases_and_sinks_are_trained_and_resumed(worlds: Callable[[str], World], tmp_path: Path) -> None:
    """Of parameters without weight decay too. States of every family under every layout: test_training_state.py."""
    world = worlds("gpt_oss")
    expected = check_resumed(world, tmp_path, "TP2 EP2", ["TP2 EP2", "PP2"])
    before = dict(world.model.named_parameters())
    for kind in ("sinks", "router.bias", "o_proj.bias", "q_proj.bias", "gate_up_proj_bias", "down_proj_bias"):
        names = [name for name in expected if name.endswith(kind)]
        assert len(names) == world.model.config.num_hidden_layers
        for name in names:  # none of it zero
            assert expected[name].all()
            assert not np.array_equal(expected[name], before[name].detach().numpy())


def check_resumed(
    world: World, folder: Path, first: str, others: list[str], estimator: str = "k2"
) -> dict[str, np.ndarray]:
    """The weights after eight steps under `first`."""

    def run(layout: str, *steps: Any) -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
        ranks, sizes = LAYOUTS[layout]
        return run_ranks(train_eight, ranks, str(world.path), sizes, world.lesson, folder, estimator, *steps)[0]

    whole, expected = run(first, 0, 8)
    for second in others:
        resumed, weights = run(second, 4, 8)
        rates = [metrics["optimizer/lr"] for metrics in (*whole, *resumed)]
        assert rates == pytest.approx([cosine(step) for step in (*range(8), *range(4, 8))], rel=1e-12)
        same_layout = first == second
        for name, tensor in expected.items():
            if same_layout:
                np.testing.assert_array_equal(weights[name], tensor, err_msg=name)
            else:
                np.testing.assert_allclose(weights[name], tensor, atol=1e-6, rtol=0, err_msg=name)
        for one, other in zip(whole[4:], resumed, strict=True):
            if same_layout:
                assert other["optimizer/loss"] == one["optimizer/loss"]
                assert other["optimizer/grad_norm"] == one["optimizer/grad_norm"]
            else:
                # The rounding of the weights (1e-7) comes back enlarged by the slope, and by the curvature.
                assert other["optimizer/loss"] == pytest.approx(one["optimizer/loss"], abs=5e-6)
                assert other["optimizer/grad_norm"] == pytest.approx(one["optimizer/grad_norm"], rel=1e-3)
    return expected


CHANGED = {
    **{"beta1": 0.5, "beta2": 0.95, "epsilon": 1e-5, "weight_decay": 0.25, "min_loss_scale": 2.0},
    **{"loss_scale_window": 7, "loss_scale_hysteresis": 3},
}


def resumed_settings(rank: int, path: str, root: Path) -> tuple[dict[str, float], int]:
    """What an optimizer with other settings than those of the state that it loads works with, and its step."""
    from megatron.core import parallel_state

    from megatron_dppo.checkpoint.state_parts import distributed_parts
    from megatron_dppo.checkpoint.training_state import TrainingStates

    before = build_actor(path, {}, Case(), dtype="float16", initial_loss_scale=1024.0)
    TrainingStates(root, before.trainee).save(3, {})
    parallel_state.destroy_model_parallel()
    actor = build_actor(path, {}, Case(), dtype="float16", initial_loss_scale=64.0, **CHANGED)
    step = TrainingStates(root, actor.trainee).load().step
    (part,) = distributed_parts(actor.optimizer)
    group, scale = part.optimizer.param_groups[0], part.grad_scaler
    found = {"beta1": group["betas"][0], "beta2": group["betas"][1], "epsilon": group["eps"]}
    found |= {"weight_decay": group["weight_decay"], "min_loss_scale": scale.min_scale.item()}
    found |= {"loss_scale_window": scale.growth_interval, "loss_scale_hysteresis": scale.hysteresis}
    return found | {"loss_scale": scale.scale.item()}, step


def test_settings_that_may_change_do_and_the_loss_scale_is_the_states(world: World, tmp_path: Path) -> None:
    ((found, step),) = run_ranks(resumed_settings, 1, str(world.path), tmp_path)
    assert (found, step) == (CHANGED | {"loss_scale": 1024.0}, 3)
    assert {placed(f"optimizer.{name}") for name in CHANGED} == {"result"}
    assert placed("optimizer.initial_loss_scale") == "free"
