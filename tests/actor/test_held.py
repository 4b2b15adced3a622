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


def left_over(rank: int, path: str, layout: dict, batch: Any, case: Case) -> tuple[int, list[str]]:
    """How many inputs decoder layers were called with, and those that live on after the step, and a second one."""
    from megatron_dppo.actor.actor import TrainingSignal
    from megatron_dppo.batch import InMemorySource

    actor = build_actor(path, layout, case)
    seen: list[tuple[str, weakref.ref[torch.Tensor]]] = []
    for name, module in actor.model[0].named_modules():
        if type(module).__name__ == "TransformerLayer":

            def note(_: Any, args: Any, kwargs: Any, name: str = name) -> None:
                hidden = args[0] if args else kwargs["hidden_states"]
                seen.append((name, weakref.ref(hidden)))

            module.register_forward_pre_hook(note, with_kwargs=True)
    signal = TrainingSignal(advantages(), advantages(), [np.arange(len(advantages()))])
    for _ in range(2):  # the second finds the dispatchers as the first left them
        actor.update(InMemorySource.of(batch), signal)
    return len(seen), [name for name, reference in seen if reference() is not None]


@pytest.mark.parametrize(("layout", "dispatcher"), [("EP2", "alltoall"), ("TP2", "allgather")])
def test_no_activation_outlives_a_step(tmp_path, layout: str, dispatcher: str) -> None:
    from tests.actor.reference import make_rollout

    model = tiny_qwen3_moe(tmp_path, seed=3)
    batch = make_rollout(model, seed=4, temperature=TEMPERATURE, **SHAPE)
    case = Case(preset="dppo-binary-tv", recompute="full", dispatcher=dispatcher)
    ranks, parallel = LAYOUTS[layout]
    for count, left in run_ranks(left_over, ranks, str(tmp_path), parallel, batch, case):
        assert count >= 8
        assert left == []
