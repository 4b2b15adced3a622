"""Adapters through a saved state, host memory and other precisions."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_dppo.errors import UserError
from tests.actor.conftest import World
from tests.actor.matrix import LAYOUTS, Case, Lesson, build_actor, exported
from tests.actor.reference import by_hf_name
from tests.distributed import run_ranks
from tests.peft_adapters import LORA

MINI_BATCHES = [np.arange(0, 6), np.arange(3, 9), np.arange(6, 12), np.arange(2, 8)]


def updates(actor: Any, lesson: Lesson, numbers: range) -> list[dict[str, float]]:
    from megatron_dppo.actor.actor import TrainingSignal
    from megatron_dppo.batch import InMemorySource

    signals = [TrainingSignal(lesson.advantages, lesson.advantages, [MINI_BATCHES[i]]) for i in numbers]
    return [actor.update(InMemorySource.of(lesson.batch), signal).metrics for signal in signals]


def four_steps(
    rank: int, path: str, layout: dict, lesson: Lesson, root: Path, first: int
) -> tuple[Any, Any, list[str]]:
    """Steps `first ... 3`; from the state that was saved after two unless first is 0. Also what that state holds."""
    from torch.distributed.checkpoint import FileSystemReader

    from megatron_dppo.checkpoint.state_folder import latest_state
    from megatron_dppo.checkpoint.training_state import TrainingStates

    actor = build_actor(path, layout, Case(), lora=LORA)
    states = TrainingStates(root, actor.trainee)
    if first:
        with torch.no_grad():
            for chunk in actor.chunks:
                for parameter in chunk.parameters():
                    if parameter.requires_grad:
                        parameter.fill_(7.0)
        assert states.load().step == 2
    metrics = updates(actor, lesson, range(first, 2))
    if not first:
        states.save(2, {})
    metrics += updates(actor, lesson, range(2, 4))
    written = list(FileSystemReader(latest_state(root)).read_metadata().state_dict_metadata)
    return metrics, exported(actor), written


@pytest.mark.parametrize(
    ("first", "second"), [("TP2 EP2", "TP2 EP2"), pytest.param("TP2 EP2", "PP2", marks=pytest.mark.full)]
)
def test_a_resumed_run_goes_on(world: World, tmp_path: Path, first: str, second: str) -> None:
    def run(layout: str, start: int) -> tuple[Any, Any, list[str]]:
        ranks, sizes = LAYOUTS[layout]
        return run_ranks(four_steps, ranks, str(world.path), sizes, world.lesson, tmp_path, start)[0]

    whole, expected, written = run(first, 0)
    kinds = Counter(key.rsplit(".", 1)[-1] for key in written if not key.startswith(("rng", "common_state")))
    matrices = 4 * (2 + 2)  # of attention and, all experts of a layer in one tensor, of the experts
    assert kinds == {"lora_a": 4 * matrices, "lora_b": 4 * matrices}, "not weight, master and two moments of each"
    resumed, got, _ = run(second, 2)
    for one, other in zip(whole[2:], resumed, strict=True):
        if first == second:
            assert other == one
        else:
            assert other["optimizer/loss"] == pytest.approx(one["optimizer/loss"], abs=1e-6)
            assert other["optimizer/grad_norm"] == pytest.approx(one["optimizer/grad_norm"], rel=1e-3)
    tolerance = 0 if first == second else 1e-6
    for name, tensor in expected.items():
        np.testing.assert_allclose(got[name], tensor, atol=tolerance, rtol=0, err_msg=name)


def refusals(rank: int, path: str, root: Path) -> list[str]:
    """States of adapters and of all weights, and of other adapters, are not mixed up."""
    from megatron.core import parallel_state

    from megatron_dppo.checkpoint.training_state import TrainingStates

    found = []
    for saved, lora in ((LORA, None), (None, LORA), (LORA, LORA | {"rank": 2})):
        folder = root / str(len(found))
        TrainingStates(folder, build_actor(path, {}, Case(), lora=saved).trainee).save(1, {})
        parallel_state.destroy_model_parallel()
        with pytest.raises(UserError) as caught:
            TrainingStates(folder, build_actor(path, {}, Case(), lora=lora).trainee).load()
        found.append(str(caught.value))
        parallel_state.destroy_model_parallel()
    return found


def test_states_of_other_weights_are_refused(world: World, tmp_path: Path) -> None:
    (found,) = run_ranks(refusals, 1, str(world.path), tmp_path)
    adapters = r"adapters of rank 4, alpha 10.0 on \['qkv', 'o', 'mlp', 'experts'\]".replace("\\", "")
    assert f"holds {adapters}, this run trains all weights; set lora alike" in found[0]
    assert f"holds all weights, this run trains {adapters}" in found[1]
    assert f"holds {adapters}, this run trains adapters of rank 2" in found[2]


def variants(rank: int, path: str, layout: dict, lesson: Lesson) -> dict[str, Any]:
    """(metrics, weights at the end) of two steps: plain, with everything in host memory between them, with overlapped
    collectives; one step of some targets only, and of half precisions; the bytes that moved, and that stayed."""
    from megatron.core import parallel_state

    found: dict[str, Any] = {}

    def run(name: str, *, steps: int = 2, lora: dict[str, Any] | None = None, **options: Any) -> None:
        actor = build_actor(path, layout, Case(), lora=LORA | (lora or {}), **options)
        metrics = updates(actor, lesson, range(1))
        if name == "moved":
            everything = [p for chunk in actor.model for p in chunk.parameters()]
            bytes_of = {id(p): p.untyped_storage().nbytes() for p in everything}
            found["moved bytes"] = (actor.offload(), sum(bytes_of[id(p)] for p in everything if not p.requires_grad))
            found["left bytes"] = sum(p.untyped_storage().nbytes() for p in everything)
            actor.onload()
        metrics += updates(actor, lesson, range(1, steps))
        found[name] = metrics, {n: t.float().numpy().copy() for n, t in actor.export_weights() if t is not None}
        parallel_state.destroy_model_parallel()

    run("plain")
    run("moved")
    run("overlapped", overlap_grad_reduce=True, overlap_param_gather=True)
    run("experts", steps=1, lora={"targets": ("experts",)})
    run("attention", steps=1, lora={"targets": ("qkv", "o")})
    run("bfloat16", steps=1, dtype="bfloat16")
    run("float16", steps=1, dtype="float16", initial_loss_scale=256.0)
    return found


def test_offload_overlap_targets_and_half_precision(world: World) -> None:
    ranks, sizes = LAYOUTS["EP2"]
    found = run_ranks(variants, ranks, str(world.path), sizes, world.lesson)[0]
    moved, frozen = found["moved bytes"]
    assert moved > frozen > 0
    assert found["left bytes"] == 0
    metrics, weights = found["plain"]
    for name in ("moved", "overlapped"):
        assert found[name][0] == metrics
        for tensor, right in weights.items():
            np.testing.assert_array_equal(found[name][1][tensor], right, err_msg=f"{name}: {tensor}")
    changed = {}
    for name in ("experts", "attention", "bfloat16", "float16"):
        (step,), after = found[name]
        assert step["optimizer/skipped_steps"] == 0, name
        dtype = getattr(torch, name, torch.float32)
        base = {n: p.detach().to(dtype).float().numpy() for n, p in world.model.named_parameters()}
        changed[name] = {n for n, t in after.items() if not np.array_equal(t, by_hf_name(base, n))}
    attention = {f"model.layers.{i}.self_attn.{k}_proj.weight" for i in range(4) for k in "qkvo"}
    assert changed["attention"] == attention
    assert all(".mlp.experts." in name for name in changed["experts"])
    assert len(changed["experts"]) == 4 * 8 * 3
    assert attention < changed["float16"]
    assert changed["bfloat16"] <= changed["experts"] | attention
    assert len(changed["bfloat16"]) > 100
