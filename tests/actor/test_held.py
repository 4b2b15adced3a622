"""What is left in memory between steps, and what is computed twice so that it need not be there."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import replace
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


def forwards(rank: int, path: str, batch: Any, cases: list[Case]) -> list[Counter[tuple[int, bool]]]:
    """How often each layer ran in an update, by its number and whether a backward followed from that very forward."""
    from megatron.core import parallel_state

    from megatron_dppo.actor.actor import TrainingSignal
    from megatron_dppo.batch import InMemorySource

    found = []
    for case in cases:
        actor = build_actor(path, {}, case)
        counts: Counter[tuple[int, bool]] = Counter()
        for layer in actor.model[0].decoder.layers:
            layer.register_forward_pre_hook(
                lambda one, _, counts=counts: counts.update([(one.layer_number, torch.is_grad_enabled())])
            )
        signal = TrainingSignal(advantages(), advantages(), [np.arange(len(advantages()))])
        actor.update(InMemorySource.of(batch), signal)
        found.append(counts)
        parallel_state.destroy_model_parallel()
    return found


def test_layers_that_are_computed_again_are_the_first(tmp_path) -> None:
    from tests.actor.reference import make_rollout

    model = tiny_qwen3_moe(tmp_path, seed=3)
    batch = make_rollout(model, seed=4, temperature=TEMPERATURE, **SHAPE)
    layers = model.config.num_hidden_layers
    assert layers > 2
    full = Case(recompute="full")
    cases = [Case(), full, *(replace(full, recompute_layers=n) for n in (1, layers - 1, layers, layers + 1))]
    (counts,) = run_ranks(forwards, 1, str(tmp_path), batch, cases)
    for case, found in zip(cases, counts, strict=True):
        again = 0 if case.recompute == "none" else case.recompute_layers or layers
        microbatches = found[1, True]
        assert microbatches > 1
        for layer in range(1, layers + 1):
            assert found[layer, True] == microbatches
            assert found[layer, False] == (microbatches if layer <= again else 0), (case, layer)
