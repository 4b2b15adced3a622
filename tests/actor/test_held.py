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


def forwards(
    rank: int, path: str, batch: Any, cases: list[Case]
) -> list[tuple[Counter[tuple[int, bool]], Counter[int], float]]:
    """How often each layer ran in an update, by its number and whether a backward followed from that very forward; how
    often its experts' rows were gone when it returned; and the gradient's norm."""
    from megatron.core import parallel_state

    from megatron_dppo.actor.actor import TrainingSignal
    from megatron_dppo.batch import InMemorySource

    found = []
    for case in cases:
        actor = build_actor(path, {}, case)
        counts: Counter[tuple[int, bool]] = Counter()
        gone: Counter[int] = Counter()
        rows: dict[int, torch.UntypedStorage] = {}
        for layer in actor.model[0].decoder.layers:
            number = layer.layer_number
            layer.register_forward_pre_hook(
                lambda *_, counts=counts, number=number: counts.update([(number, torch.is_grad_enabled())])
            )
            layer.mlp.experts.register_forward_pre_hook(
                lambda _, args, rows=rows, number=number: rows.update({number: args[0].untyped_storage()})
            )
            layer.register_forward_hook(
                lambda *_, gone=gone, rows=rows, number=number: gone.update([number] * (rows[number].nbytes() == 0))
            )
        signal = TrainingSignal(advantages(), advantages(), [np.arange(len(advantages()))])
        metrics = actor.update(InMemorySource.of(batch), signal).metrics
        found.append((counts, gone, metrics["optimizer/grad_norm"]))
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
    for case, (found, gone, norm) in zip(cases, counts, strict=True):
        again = 0 if case.recompute == "none" else case.recompute_layers or layers
        microbatches = found[1, True]
        assert microbatches > 1
        for layer in range(1, layers + 1):
            assert found[layer, True] == microbatches
            assert found[layer, False] == (microbatches if layer <= again else 0), (case, layer)
            sorted_again = case.recompute_layers is not None and layer > again
            assert gone[layer] == (microbatches if sorted_again else 0), (case, layer)
        assert norm == pytest.approx(counts[0][2], rel=1e-6)
