"""Passes without a backward keep no activations: the first rollout of a run is recomputed whole before any update."""

from __future__ import annotations

from typing import Any

import numpy as np
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
