"""What is left in memory between steps."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch

from tests.actor.matrix import LAYOUTS, SHAPE, TEMPERATURE, Case, advantages, build_actor
from tests.distributed import run_ranks
from tests.tiny import tiny_qwen3_moe


def left_over(rank: int, path: str, layout: dict, batch: Any, case: Case) -> tuple[int, list[str], list[str]]:
    """How many layers were recomputed; the inputs of layers that lived on in the same backward when their own part of
    it was over; those that did after two steps."""
    from megatron_dppo.actor.actor import TrainingSignal
    from megatron_dppo.batch import InMemorySource

    actor = build_actor(path, layout, case)
    seen: list[tuple[str, weakref.ref[torch.Tensor]]] = []
    behind: list[str] = []

    def note(layer: str, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():  # recomputed: the backward comes from the last layer to the first
            # The one just behind may not have been let go of yet.
            behind.extend(f"{name} at {layer}" for name, reference in seen[:-1] if reference() is not None)
            seen.append((layer, weakref.ref(args[0] if args else kwargs["hidden_states"])))

    for name, module in actor.model[0].named_modules():
        if type(module).__name__ == "TransformerLayer":
            module.register_forward_pre_hook(lambda _, a, k, name=name: note(name, a, k), with_kwargs=True)
    signal = TrainingSignal(advantages(), advantages(), [np.arange(len(advantages()))])
    for _ in range(2):  # the second finds the dispatchers as the first left them
        actor.update(InMemorySource.of(batch), signal)
    return len(seen), behind, [name for name, reference in seen if reference() is not None]


@pytest.mark.parametrize(("layout", "dispatcher"), [("EP2", "alltoall"), ("TP2", "allgather")])
def test_no_activation_outlives_its_backward(tmp_path, layout: str, dispatcher: str) -> None:
    from tests.actor.reference import make_rollout

    model = tiny_qwen3_moe(tmp_path, seed=3)
    batch = make_rollout(model, seed=4, temperature=TEMPERATURE, **SHAPE)
    case = Case(preset="dppo-binary-tv", recompute="full", dispatcher=dispatcher)
    ranks, parallel = LAYOUTS[layout]
    for count, behind, left in run_ranks(left_over, ranks, str(tmp_path), parallel, batch, case):
        assert count >= 8
        assert behind == []
        assert left == []
