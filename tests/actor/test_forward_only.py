"""Passes without a backward keep no activations: the first rollout of a run is recomputed whole before any update."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.actor.matrix import LAYOUTS, SHAPE, TEMPERATURE, Case, advantages, build_actor
from tests.distributed import run_ranks
from tests.tiny import tiny_qwen3_moe


def grad_modes(rank: int, path: str, layout: dict, batch: Any) -> dict[str, list[bool]]:
    """Whether the model's forward passes recorded a graph, by what they were for."""
    from megatron_dppo.actor.actor import TrainingSignal
    from megatron_dppo.batch import InMemorySource

    actor = build_actor(path, layout, Case(preset="minirl"))
    source = InMemorySource.of(batch)
    modes: list[bool] = []
    actor.model[0].register_forward_hook(lambda *_: modes.append(torch.is_grad_enabled()))
    found = {}
    for replay in (True, False):
        actor.parity(source, replay=replay)
        found[f"parity, replay {replay}"], modes[:] = list(modes), []
    actor.update(source, TrainingSignal(advantages(), advantages(), [np.arange(len(advantages()))]))
    found["recomputed, then trained"] = list(modes)
    return found


def mismatches(rank: int, path: str, layout: dict, batch: Any) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Of `parity`, and of two updates of two mini-batches and epochs each that follow."""
    from megatron_dppo.actor.actor import TrainingSignal
    from megatron_dppo.batch import InMemorySource

    actor = build_actor(path, layout, Case())
    source = InMemorySource.of(batch)
    parity = actor.parity(source, replay=True).metrics
    everything = np.arange(len(advantages()))
    signals = [TrainingSignal(advantages(), advantages(), parts, 2) for parts in ([everything], [everything[:6]])]
    return parity, [actor.update(source, signal).metrics for signal in signals]


def test_mismatch_is_of_the_weights_that_the_update_began_with(tmp_path) -> None:
    """Not moved by its own gradient steps, as the drift is: what a pass before the update finds."""
    from tests.actor.reference import make_rollout

    model = tiny_qwen3_moe(tmp_path, seed=3)
    batch = make_rollout(model, seed=4, temperature=TEMPERATURE, **SHAPE)
    parity, (first, second) = run_ranks(mismatches, 1, str(tmp_path), LAYOUTS["1 rank"][1], batch)[0]
    assert first["mismatch/mean_abs_pi_mu"] == pytest.approx(parity["mean_abs_prob_gap"], rel=1e-5)
    assert first["policy/mean_abs_pi_mu"] != pytest.approx(first["mismatch/mean_abs_pi_mu"], rel=1e-3)
    assert second["mismatch/mean_abs_pi_mu"] != pytest.approx(first["mismatch/mean_abs_pi_mu"], rel=1e-3)
    assert first["mismatch/max_abs_pi_mu"] <= first["policy/abs_prob_diff_max"]


def test_only_training_records_a_graph(tmp_path) -> None:
    from tests.actor.reference import make_rollout

    model = tiny_qwen3_moe(tmp_path, seed=3)
    batch = make_rollout(model, seed=4, temperature=TEMPERATURE, **SHAPE)
    ranks, layout = LAYOUTS["PP2"]
    for found in run_ranks(grad_modes, ranks, str(tmp_path), layout, batch):
        both = found.pop("recomputed, then trained")
        half = len(both) // 2
        assert half > 0
        assert both == [False] * half + [True] * half
        for what, modes in found.items():
            assert modes, what
            assert not any(modes), what
