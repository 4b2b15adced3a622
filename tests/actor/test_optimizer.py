"""Overlapped gradient reduction and weight gathering change when ranks talk, not what they compute, and few launches
compute what many do; bad settings."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from megatron_dppo.actor.config import ActorConfig, OptimizerConfig
from megatron_dppo.errors import UserError
from tests.actor.matrix import LAYOUTS, SHAPE, TEMPERATURE, Case, advantages, build_actor, exported
from tests.distributed import run_ranks
from tests.tiny import tiny_qwen3_moe

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
OVERLAPS = [{}, {"overlap_grad_reduce": True}, {"overlap_grad_reduce": True, "overlap_param_gather": True}]


def train(rank: int, path: str, layouts: list[str], batch: Any) -> list[list[Any]]:
    """For every layout and overlap: metrics of three updates and the weights after them."""
    from megatron.core import parallel_state

    from megatron_dppo.actor.actor import TrainingSignal
    from megatron_dppo.batch import InMemorySource

    found = []
    for layout in layouts:
        outcomes = []
        for overlap in OVERLAPS:
            actor = build_actor(path, LAYOUTS[layout][1], Case(), **overlap)
            source = InMemorySource.of(batch)
            signal = TrainingSignal(advantages(), advantages(), [np.arange(0, 6), np.arange(6, 12)])
            metrics = [actor.update(source, signal).metrics for _ in range(2)]
            parity = actor.parity(source, replay=True).metrics
            outcomes.append((metrics, parity, exported(actor)))
            parallel_state.destroy_model_parallel()
        found.append(outcomes)
    return found


def test_overlap_changes_nothing(tmp_path) -> None:
    from tests.actor.reference import make_rollout

    model = tiny_qwen3_moe(tmp_path, seed=3)
    batch = make_rollout(model, seed=4, temperature=TEMPERATURE, **SHAPE)
    layouts = ["EP2", "PP2 VPP2"]
    results = run_ranks(train, 2, str(tmp_path), layouts, batch)
    for layout, (plain, *overlapped) in zip(layouts, results[0], strict=True):
        metrics, parity, weights = plain
        assert metrics[0]["optimizer/loss"] != metrics[1]["optimizer/loss"]
        for number, other in enumerate(overlapped):
            for got, expected in zip([*other[0], other[1]], [*metrics, parity], strict=True):
                assert got == pytest.approx(expected, rel=1e-5, abs=1e-6, nan_ok=True), (layout, number)
            for name, tensor in weights.items():
                np.testing.assert_allclose(other[2][name], tensor, atol=1e-6, rtol=0, err_msg=f"{layout} {name}")


def train_both_ways(rank: int, path: str, batch: Any) -> list[Any]:
    """Metrics of two updates in bfloat16 and the weights after them, by our optimizer and Megatron-Core's own class."""
    from actor_step.stock import stock_optimizer
    from megatron.core import parallel_state

    from megatron_dppo.actor.actor import TrainingSignal
    from megatron_dppo.batch import InMemorySource

    found = []
    for stock in (False, True):
        actor = build_actor(path, LAYOUTS["EP2"][1], Case(), dtype="bfloat16", weight_decay=0.1)
        signal = TrainingSignal(advantages(), advantages(), [np.arange(0, 6), np.arange(6, 12)])
        with ExitStack() as stack:
            if stock:
                stack.enter_context(stock_optimizer(actor.optimizer))
            metrics = [actor.update(InMemorySource.of(batch), signal).metrics for _ in range(2)]
        masters = [
            p.detach().numpy().copy() for part in actor.optimizer.chained_optimizers for p in part.get_parameters()
        ]
        weights = [p.detach().float().numpy() for chunk in actor.model for p in chunk.parameters()]
        found.append((metrics, masters, weights))
        parallel_state.destroy_model_parallel()
    return found


def test_few_launches_compute_what_many_do(tmp_path) -> None:
    """EP2: dense and expert parameters in optimizers of their own, dense ones sharded over two data-parallel ranks."""
    from tests.actor.reference import make_rollout

    batch = make_rollout(tiny_qwen3_moe(tmp_path, seed=3), seed=4, temperature=TEMPERATURE, **SHAPE)
    for (metrics, masters, weights), (stock_metrics, stock_masters, stock_weights) in run_ranks(
        train_both_ways, 2, str(tmp_path), batch
    ):
        assert metrics == stock_metrics
        assert metrics[0]["optimizer/grad_norm"] > 1, "clipping had something to do"
        for ours, theirs in zip([*masters, *weights], [*stock_masters, *stock_weights], strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_layers_of_no_full_recomputation() -> None:
    with pytest.raises(ValidationError, match=r"actor\.recompute_layers=3 counts layers that actor\.recompute=full"):
        ActorConfig(recompute="none", recompute_layers=3)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"overlap_param_gather": True}, "overlap_grad_reduce"),
        ({"initial_loss_scale": 2.0, "min_loss_scale": 4.0}, "min_loss_scale"),
        ({"schedule": "cosine", "warmup_steps": 5, "decay_steps": 5}, "decay_steps"),
    ],
)
def test_settings_that_do_not_fit(settings: dict, named: str) -> None:
    with pytest.raises(ValidationError, match=f"optimizer.{named}"):
        OptimizerConfig(**settings)


def test_state_on_the_host_needs_a_device_to_be_away_from() -> None:
    from megatron_dppo.actor.optimizer import build_optimizer

    with pytest.raises(UserError, match=r"optimizer.cpu_offload_fraction=0.5 needs a CUDA device"):
        build_optimizer(OptimizerConfig(cpu_offload_fraction=0.5), [torch.nn.Linear(1, 1)], torch.bfloat16)
