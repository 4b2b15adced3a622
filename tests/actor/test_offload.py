"""Offloading frees every byte of weights, optimizer state and gradient buffers, and training does not notice."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.actor.matrix import LAYOUTS, SHAPE, TEMPERATURE, Case, advantages, build_actor
from tests.distributed import run_ranks
from tests.tiny import tiny_qwen3_moe


def train(rank: int, path: str, layout: dict, dtype: str, batch: Any) -> dict[str, Any]:
    """Two updates with nothing between them, and again with everything moved away and back in parts."""
    from megatron.core import parallel_state

    from megatron_dppo.actor.actor import TrainingSignal
    from megatron_dppo.batch import InMemorySource

    found: dict[str, Any] = {}
    signal = TrainingSignal(advantages(), advantages(), [np.arange(len(advantages()))])
    for name in ("stays", "moves"):
        actor = build_actor(path, layout, Case(), dtype=dtype)
        source = InMemorySource.of(batch)
        first = actor.update(source, signal).metrics
        if name == "moves":
            found |= move(actor, source, signal)
        second = actor.update(source, signal).metrics
        found[name] = [first, second], {n: t.float().numpy() for n, t in actor.export_weights() if t is not None}
        parallel_state.destroy_model_parallel()
    return found


def no_room(rank: int, path: str) -> tuple[bool, bool, bool]:
    """A device that has no room for the second of the storages that come back, and later has."""
    from megatron_dppo.actor import offload

    actor = build_actor(path, {}, Case())
    before = {name: tensor.numpy().copy() for name, tensor in actor.export_weights() if tensor is not None}
    actor.offload()
    allocate, calls = offload._Storage.allocate, []

    def fails(storage: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        allocate(storage)

    offload._Storage.allocate = fails  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="out of memory"):
        actor.onload()
    refused = False
    try:
        actor.export_weights()
    except RuntimeError:
        refused = True
    actor.onload()
    after = {name: tensor.numpy() for name, tensor in actor.export_weights() if tensor is not None}
    return len(calls) > 2, refused, all(np.array_equal(after[name], before[name]) for name in before)


def test_what_did_not_come_back_whole_is_not_taken_for_it_and_can_come_again(tmp_path: Path) -> None:
    tiny_qwen3_moe(tmp_path, seed=3, num_hidden_layers=1)
    (found,) = run_ranks(no_room, 1, str(tmp_path))
    assert found == (True, True, True)


def by_its_thread(rank: int, path: str) -> tuple[list[bool], list[bool], int, bool]:
    """What leaves and comes back by the offloader's thread, as on a GPU: which of these calls raised, before and after
    a copy failed, the device that the thread had, and whether what had not left for certain still has its memory."""
    from megatron_dppo.actor import offload

    actor = build_actor(path, {}, Case(), dtype="bfloat16")
    offloader, devices = actor.offloader, {}
    offloader._stream = stream = torch.cuda.Stream()
    stream.device = 3
    cuda: Any = torch.cuda
    cuda.set_device = lambda device: devices.update({threading.get_ident(): device})
    enter = cuda.stream
    used: list[int] = []

    def entered(stream: Any) -> Any:
        used.append(devices.get(threading.get_ident(), 0))
        return enter(stream)

    cuda.stream = entered
    before = {name: tensor.float().numpy() for name, tensor in actor.export_weights() if tensor is not None}

    def raises(call: Any, *arguments: Any) -> bool:
        try:
            call(*arguments)
        except RuntimeError as error:
            return str(error) == "no copy"
        return False

    well = [raises(actor.offload), raises(actor.onload)]
    after = {name: tensor.float().numpy() for name, tensor in actor.export_weights() if tensor is not None}
    assert all(np.array_equal(after[name], before[name]) for name in before)
    send, calls = offload._Storage.send, []

    def fails(storage: Any) -> None:
        calls.append(storage)
        if len(calls) == 2:
            raise RuntimeError("no copy")
        send(storage)

    offload._Storage.send = fails  # type: ignore[method-assign]
    badly = [raises(offloader.leave, ("optimizer",)), raises(offloader.offload, ("weights",)), raises(actor.onload)]
    assert set(used) == {used[0]}
    return well, badly, used[0], all(one.storage.nbytes() == one.size for one in offloader._leaving)


def test_a_copy_that_failed_is_never_taken_for_one(tmp_path: Path) -> None:
    """Its storage keeps its memory, and whoever wants to go on, to save a last state, hears of it again. Nor does the
    thread leave a context on GPU 0, to which each thread goes back that has no device of its own."""
    tiny_qwen3_moe(tmp_path, seed=3, num_hidden_layers=1)
    (found,) = run_ranks(by_its_thread, 1, str(tmp_path))
    assert found == ([False, False], [False, True, True], 3, True)


def in_parts(rank: int, path: str, batch: Any) -> dict[str, Any]:
    """Two updates. Between them optimizer state goes away until there is enough room, some of it never."""
    from megatron_dppo.actor.actor import TrainingSignal
    from megatron_dppo.batch import InMemorySource

    kept = 40_000
    actor = build_actor(path, {}, Case(), dtype="bfloat16", keep_on_gpu_gib=kept / 2**30)
    source = InMemorySource.of(batch)
    signal = TrainingSignal(advantages(), advantages(), [np.arange(len(advantages()))])
    first = actor.update(source, signal).metrics
    there = [s.storage for s in actor.offloader._storages("optimizer")]
    everything = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in actor.offloader._tensors("optimizer")}
    stays = sum(s.nbytes() for s in everything.values()) - sum(s.nbytes() for s in there)
    sizes = [storage.nbytes() for storage in there]
    lacks = iter([1, 20_000, 300, 0])  # the first of them is in the gradients
    copied = actor.offloader.make_room(("optimizer", "gradients"), lambda: next(lacks))
    left = [storage.nbytes() for storage in there]
    exported = sum(tensor is not None for _, tensor in actor.export_weights())
    with pytest.raises(RuntimeError, match="optimizer, gradients are offloaded"):
        actor.update(source, signal)
    send, queued = actor.offloader._send, []

    def seen(storages: Any) -> None:
        queued.append(sum(storage.nbytes() for storage in there))
        send(storages)

    actor.offloader._send = seen
    buffers = [b.param_data for chunk in actor.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    leaving = actor.offloader.leave(("weights",))
    beside = [leaving, sum(b.untyped_storage().nbytes() for b in buffers)]
    with pytest.raises(RuntimeError, match="weights are offloaded"):
        actor.export_weights()
    assert actor.offload(("weights",)) == 0, "they have left already"
    beside.append(sum(b.untyped_storage().nbytes() for b in buffers))
    gone = sum(storage.nbytes() for storage in there)
    actor.onload()
    weights = {n: t.float().numpy() for n, t in actor.export_weights() if t is not None}
    return {
        "stays": (0 < stays <= kept, gone),
        "copied": copied == sum(sizes),
        "queued": queued[:1] == [sum(left)],
        "beside": beside,
        "left": 20_300 <= sum(sizes) - sum(left) < 20_300 + 2 * max(sizes) and exported > 0,
        "trained": ([first, actor.update(source, signal).metrics], weights),
    }


def stays_where_it_is(rank: int, path: str, batch: Any) -> tuple[Any, Any]:
    from megatron_dppo.actor.actor import TrainingSignal
    from megatron_dppo.batch import InMemorySource

    actor, source = build_actor(path, {}, Case(), dtype="bfloat16"), InMemorySource.of(batch)
    signal = TrainingSignal(advantages(), advantages(), [np.arange(len(advantages()))])
    first = actor.update(source, signal).metrics
    weights = {n: t.float().numpy() for n, t in actor.export_weights() if t is not None}
    return [first, actor.update(source, signal).metrics], weights


def test_a_part_stays_and_the_rest_leaves_as_room_is_needed(tmp_path: Path) -> None:
    from tests.actor.reference import make_rollout

    batch = make_rollout(tiny_qwen3_moe(tmp_path, seed=3), seed=4, temperature=TEMPERATURE, **SHAPE)
    (found,) = run_ranks(in_parts, 1, str(tmp_path), batch)
    ((metrics, weights),) = run_ranks(stays_where_it_is, 1, str(tmp_path), batch)
    assert found["stays"] == (True, 0)
    assert found["copied"]
    assert found["queued"], "the copies of weights waited for the end of those before"
    leaving, beside, freed = found["beside"]
    assert leaving == beside > freed == 0
    assert found["left"]
    assert found["trained"][0] == metrics
    for name, tensor in weights.items():
        np.testing.assert_array_equal(found["trained"][1][name], tensor, err_msg=name)


def move(actor: Any, source: Any, signal: Any) -> dict[str, Any]:
    from megatron_dppo.checkpoint.state_parts import distributed_parts
    from megatron_dppo.checkpoint.training_state import TrainingStates

    buffers = [b for chunk in actor.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    parts = distributed_parts(actor.optimizer)
    masters = [p for part in parts for group in part.optimizer.param_groups for p in group["params"]]
    states = [state for part in parts for state in part.optimizer.state.values()]
    moments = [value for state in states for value in state.values()]  # with torch's Adam the steps too
    everything = [b.grad_data for b in buffers] + [b.param_data for b in buffers] + masters + moments
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in everything}
    bytes_before = sum(s.nbytes() for s in storages.values())

    freed = actor.offload(["optimizer", "gradients"])
    weights_stay = all(b.param_data.untyped_storage().nbytes() > 0 for b in buffers)
    exported = sum(t is not None for _, t in actor.export_weights())
    freed += actor.offload()
    left = sum(s.nbytes() for s in storages.values())
    states = TrainingStates(Path("nowhere"), actor.trainee)
    for call in (
        lambda: actor.update(source, signal),
        lambda: actor.parity(source, replay=True),
        actor.export_weights,
        lambda: states.save(1, {}),
        states.load,
    ):
        with pytest.raises(RuntimeError, match="offloaded to the host"):
            call()
    again = actor.offload()
    actor.onload(["weights"])
    with pytest.raises(RuntimeError, match="optimizer, gradients are offloaded"):
        actor.update(source, signal)
    actor.onload()
    for buffer in buffers:
        assert torch.count_nonzero(buffer.grad_data) == 0
    # Once more, into the host buffers of the first time.
    held = len(actor.offloader._spare)
    actor.offload()
    actor.onload()
    return {
        "bytes": (bytes_before, freed, left, again, sum(s.nbytes() for s in storages.values())),
        "weights_stay": weights_stay,
        "exported": exported,
        "same_host_buffers": len(actor.offloader._spare) == held,
    }


@pytest.mark.parametrize(("layout", "dtype"), [("TP2 EP2", "bfloat16"), ("DP2", "float32")])
def test_a_step_after_offloading_is_the_same_to_the_bit(tmp_path, layout: str, dtype: str) -> None:
    from tests.actor.reference import make_rollout

    model = tiny_qwen3_moe(tmp_path, seed=3)
    batch = make_rollout(model, seed=4, temperature=TEMPERATURE, **SHAPE)
    ranks, sizes = LAYOUTS[layout]
    for found in run_ranks(train, ranks, str(tmp_path), sizes, dtype, batch):
        before, freed, left, again, after = found["bytes"]
        assert freed == before == after > 0
        assert (left, again) == (0, 0)
        assert found["weights_stay"]
        assert found["same_host_buffers"]
        metrics, weights = found["stays"]
        moved_metrics, moved_weights = found["moves"]
        assert moved_metrics == metrics
        assert metrics[0] != metrics[1], "the steps did nothing"
        assert weights.keys() == moved_weights.keys()
        for name, tensor in weights.items():
            np.testing.assert_array_equal(moved_weights[name], tensor, err_msg=name)


def allocator_settings(rank: int, given: str) -> list[str]:
    """What torch's allocator is told, and takes, before memory is page-locked for the first and the second time."""
    from megatron_dppo.actor import offload

    os.environ["PYTORCH_ALLOC_CONF"] = given
    module: Any = torch._C
    told, tell = [], module._accelerator_setAllocatorSettings

    def tells(settings: str) -> None:
        tell(settings)
        told.append(settings)

    module._accelerator_setAllocatorSettings = tells
    for _ in range(2):
        with pytest.raises((RuntimeError, AssertionError), match=r"CUDA|NVIDIA"):
            offload._page_locked(torch.device("cuda", 100))
    return told


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("", ""),
        ("max_split_size_mb:128, ", ",max_split_size_mb:128"),
        ("pinned_use_cuda_host_register:False", ",pinned_use_cuda_host_register:False"),
    ],
)
def test_the_users_allocator_settings_hold(given: str, kept: str) -> None:
    """Of a name that comes twice torch takes the last."""
    (told,) = run_ranks(allocator_settings, 1, given)
    assert told == [f"pinned_use_cuda_host_register:True,pinned_num_register_threads:8{kept}"]
