"""Weights of experts that the workers of an engine divide: each worker gets its own and what all need, nothing else."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from megatron_dppo.rollout.engine import TransferTerms
from megatron_dppo.rollout.event_loop import EventLoop
from megatron_dppo.rollout.serving.weight_updates import Gate, WeightUpdates
from megatron_dppo.rollout.weight_transfer.group import MeetingStore, WeightGroup
from megatron_dppo.rollout.weight_transfer.ipc import IpcSender
from megatron_dppo.rollout.weight_transfer.manifest import ChecksumMismatch, IncompleteSync, Manifest, gathered
from megatron_dppo.rollout.weight_transfer.turns import Emptying, Filling
from tests.distributed import PATIENCE_S, run_ranks
from tests.rollout.weight_parts import CPU, Collected, Summed, buckets_on, tensors


@pytest.mark.parametrize("sliced", [False, True])
def test_what_goes_to_several_workers_has_to_be_all_of_it(sliced: bool) -> None:
    manifest = Manifest({name: tuple(tensor.shape) for name, tensor in tensors().items()})
    layouts = buckets_on(0, 2, sliced=sliced).layouts
    manifest.check_layouts(layouts)
    last = max(index for index, layout in enumerate(layouts) if layout.share == 1)
    with pytest.raises(IncompleteSync, match="did not come"):
        manifest.check_layouts(layouts[:last] + layouts[last + 1 :])
    with pytest.raises(IncompleteSync, match="came twice"):
        manifest.check_layouts([*layouts, layouts[last]])


def test_a_bucket_without_a_checksum_is_named() -> None:
    """And no other fault is."""
    layouts = buckets_on(0, 2).layouts
    packed = {number: 10 + number for number in range(len(layouts))}
    theirs = [{i: packed[i] for i in packed if layouts[i].goes_to(worker)} for worker in (0, 1)]
    last = max(theirs[1])
    faults = [
        (packed, theirs[1], None, ""),
        ({}, theirs[1], IncompleteSync, f"the trainer sent no checksum of buckets .0, 1.*{len(packed)} of"),
        (packed | {last: 5}, theirs[1], ChecksumMismatch, rf"worker 1 loaded other bytes .* in buckets .{last}., 1 of"),
        (packed, {i: theirs[1][i] for i in theirs[1] if i != last}, IncompleteSync, rf"worker 1 has no .*.{last}., 1"),
        (
            {i: packed[i] for i in packed if i != last},
            theirs[1],
            IncompleteSync,
            rf"no checksum of buckets .{last}., 1",
        ),
    ]
    loop = EventLoop("sums")
    try:
        for sent, second, kind, message in faults:
            core: Any = Summed(theirs[0], second)
            gate = Gate("no weights yet")
            engine = WeightUpdates(core, loop, gate, Manifest(None), cut=False, timeout_s=PATIENCE_S)
            engine.begin_update(1)
            engine.agree(TransferTerms(layouts=layouts))
            engine.receive_group(1)
            with nullcontext() if kind is None else pytest.raises(kind, match=message):
                engine.end_update(1, sent)
            assert (gate.shut is None) == (kind is None)
    finally:
        loop.stop()


def colocated(rank: int, gone: int) -> tuple[list[str], bool, bool]:
    """This rank's end of a sync, and the worker on its GPU: what is wrong there, whether the sums are the sender's, and
    whether the worker let go of what was shared with it. `gone`: of which rank's worker nothing is heard after its
    first bucket."""
    buckets = buckets_on(rank, 4)
    sender = IpcSender(buckets, CPU, timeout_s=PATIENCE_S)
    memory = [torch.full((buckets.largest,), 99, dtype=torch.uint8) for _ in range(2)]
    turns = Filling(2, PATIENCE_S)
    worker = Collected(rank % 2, TransferTerms(layouts=buckets.layouts))
    worker._buffers, worker._turns = memory, Emptying(turns.path, PATIENCE_S)

    def load(slots: Any, payload: torch.Tensor) -> None:
        if rank == gone:
            raise RuntimeError("gone")
        worker.keep(slots, payload)

    def run() -> None:
        try:
            worker.take("shared", load)
        except RuntimeError:
            assert rank == gone

    reading = threading.Thread(target=run)
    reading.start()
    sender._fill(memory, turns)
    reading.join(PATIENCE_S)
    packed = gathered(sender._packed.take())
    due = {i: v for i, v in packed.items() if buckets.layouts[i].goes_to(rank % 2)}
    closed = not worker._buffers and not turns.attended
    return worker.wrong(rank % 2), worker.checksums() == due and len(packed) == len(buckets.layouts), closed


@pytest.mark.parametrize("gone", [-1, 2])
def test_colocated_workers_get_their_share(gone: int) -> None:
    """Two engines of two workers on four ranks' GPUs. A worker that is gone costs the others nothing."""
    for rank, (wrong, sums, closed) in enumerate(run_ranks(colocated, 4, gone)):
        assert (wrong == [] and sums) == (rank != gone), (rank, wrong)
        assert closed, "the rank would free memory that the worker still has open"


def test_members_of_a_share_alone_get_what_is_sent_to_it() -> None:
    meeting = MeetingStore("127.0.0.1")
    shares = ((0, 1), (2, 0))
    where = meeting.next(3, 20.0, shares=shares)
    came: dict[int, list[int]] = {}

    def member(rank: int) -> None:
        group = WeightGroup(where, rank, CPU)
        mine = [None, *(share for share, members in enumerate(shares) if rank in members)]
        parts = {share: torch.full((8,), rank, dtype=torch.uint8) for share in mine}
        source = {None: 1, 0: 1, 1: 2}
        group.wait([group.broadcast(part, source[share], share) for share, part in parts.items()])
        group.abort()
        came[rank] = [int(np.unique(part.numpy()).item()) for part in parts.values()]

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert came == {0: [1, 1, 2], 1: [1, 1], 2: [1, 2]}
