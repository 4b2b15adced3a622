"""Weights of experts that the workers of an engine divide: each worker gets its own and what all need, nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_dppo.checkpoint.weight_buckets import Source, WeightBuckets, by_matrix
from megatron_dppo.checkpoint.weight_layout import unpack
from megatron_dppo.rollout.engine import TransferTerms, WorkerReport
from megatron_dppo.rollout.event_loop import EventLoop
from megatron_dppo.rollout.serving.core import WorkerSync
from megatron_dppo.rollout.serving.weight_updates import Gate, WeightUpdates
from megatron_dppo.rollout.weight_transfer.broadcast import BroadcastSender
from megatron_dppo.rollout.weight_transfer.group import Meeting, WeightGroup
from megatron_dppo.rollout.weight_transfer.incoming import Incoming
from megatron_dppo.rollout.weight_transfer.ipc import IpcSender
from megatron_dppo.rollout.weight_transfer.manifest import ChecksumMismatch, IncompleteSync, Manifest, gathered
from megatron_dppo.rollout.weight_transfer.recipients import Recipients
from megatron_dppo.rollout.weight_transfer.turns import Emptying, Filling
from tests.distributed import PATIENCE_S, run_ranks

CPU = torch.device("cpu")
EXPERTS = 5
OWN = ({0, 1, 2}, {3, 4})
"""Experts of each of two workers, as vLLM divides five."""


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    names = ["embed.weight", "model.layers.0.o_proj.weight"]
    names += [f"model.layers.0.mlp.experts.{e}.{m}_proj.weight" for e in range(EXPERTS) for m in ("up", "down")]
    return {name: torch.randn((4, 6), generator=generator) for name in [*names, "norm.weight"]}


def buckets_on(rank: int, ranks: int, *, sliced: bool = False) -> WeightBuckets:
    """Of four ranks every one owns something: experts go round, so that no rank has those of its own worker alone."""
    whole = ((0, 4), (0, 6))
    model = tensors()
    sources = {name: [Source((3 * number + 1) % ranks, whole)] for number, name in enumerate(model)}
    local = {
        (name, whole): partial(torch.Tensor.view, tensor, -1)
        for name, tensor in model.items()
        if sources[name][0].rank == rank
    }
    described = [(name, (4, 6), torch.float32) for name in by_matrix(model)]
    return WeightBuckets(described, sources, local, rank=rank, bucket_bytes=200, shares=2, sliced=sliced)


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


class Summed:
    """A core whose two workers loaded everything, and say which sums they have."""

    def __init__(self, *sums: dict[int, int]) -> None:
        self._sums = sums

    async def nothing(self, *_: Any, **__: Any) -> None: ...

    agree = hold = start_update = load = abandon_update = resume = nothing

    async def finish_update(self, version: int) -> list[WorkerSync]:
        return [WorkerSync(sums, WorkerReport(load_s=0.0, finish_s=0.0)) for sums in self._sums]


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
            engine.agree(TransferTerms(layouts=layouts))
            engine.begin_update(1)
            engine.receive_group(1)
            with nullcontext() if kind is None else pytest.raises(kind, match=message):
                engine.end_update(1, sent)
            assert (gate.shut is None) == (kind is None)
    finally:
        loop.stop()


class Collected(Incoming):
    """A worker that keeps what it gets."""

    def __init__(self, worker: int, terms: TransferTerms) -> None:
        super().__init__(CPU)
        self.agree(terms, worker)
        self.came: dict[str, torch.Tensor] = {}

    def keep(self, slots: Any, payload: torch.Tensor) -> None:
        for slot, tensor in unpack(slots, payload):
            for name, single in zip(slot.names(), tensor if slot.experts else [tensor], strict=True):
                assert name not in self.came
                self.came[name] = single.clone()

    def wrong(self, worker: int) -> list[str]:
        """What is not as it should be."""
        due = {n: t for n, t in tensors().items() if ".experts." not in n or int(n.split(".")[5]) in OWN[worker]}
        found = [name for name in due if not torch.equal(self.came.get(name, torch.zeros(1)), due[name])]
        return found + sorted(self.came.keys() - due.keys())


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


class Engine:
    """An engine of two workers, threads of this process, as far as a sync sees it; its own client. `fault`: its second
    worker ends at its second bucket ("gone"), or it cannot open an update ("refuses")."""

    def __init__(self, name: str) -> None:
        self.name, self.fault, self.asked = name, "", 0
        self.version = 0
        self.workers = [Collected(worker, TransferTerms()) for worker in (0, 1)]
        self._calls = ThreadPoolExecutor(1)
        self._threads = ThreadPoolExecutor(2)

    def ask(self, call: Callable[[Any], Any], lane: str) -> Future[Any]:
        self.asked += 1
        return self._calls.submit(call, self)

    def begin_update(self, version: int) -> None:
        self.version = 0
        if self.fault == "refuses":
            raise RuntimeError("refuses")
        deadline = time.monotonic() + 20.0
        while version == 2 and self.asked < 5:  # in the first sync three, of which one is to agree
            assert time.monotonic() < deadline, "an engine is asked to receive when others have answered"
            time.sleep(0.01)
        self.version = version
        for worker in self.workers:
            worker.begin()
            worker.came = {}

    def agree(self, terms: TransferTerms) -> None:
        self._both(lambda number: self.workers[number].agree(terms, number))

    def receive_group(self, version: int) -> None:
        assert version == self.version
        self._both(self._receive)

    def _receive(self, number: int) -> None:
        worker, seen = self.workers[number], []

        def load(slots: Any, payload: torch.Tensor) -> None:
            seen.append(slots)
            if self.fault == "gone" and number == 1 and len(seen) == 2:
                worker.leave()
                raise RuntimeError("gone")
            worker.keep(slots, payload)

        worker.take("group", load)

    def _both(self, call: Callable[[int], None]) -> None:
        for done in [self._threads.submit(call, number) for number in (0, 1)]:
            done.result(PATIENCE_S)


def broadcast(rank: int, fault: str, timeout_s: float) -> tuple[dict[str, list[list[str]]], list[str]]:
    """Two syncs to a fleet: what is wrong with each worker of each engine after the second, and which engines failed
    in it."""
    buckets = buckets_on(rank, 2)
    control = dist.new_group()
    sender = BroadcastSender(buckets, CPU, workers_per_engine=2, timeout_s=timeout_s, control=control)
    engines = [Engine("a"), Engine("b")]
    clients: Any = engines
    room: list[list[list[int]]] = []
    for version in (1, 2):
        to = Recipients(clients, timeout_s=60.0) if rank == 0 else None
        engines[1].fault = fault if version == 2 else ""
        sender.begin(version, to)
        packed = sender.send(version, to)
        room.append([[part.data_ptr() for part in one._room] for engine in engines for one in engine.workers])
    sender.close()
    if to is None:
        return {}, []
    wrong = {}
    for engine in to.engines:
        mine: Any = engine
        wrong[engine.name] = [one.wrong(worker) for worker, one in enumerate(mine.workers)]
        for worker, one in enumerate(mine.workers):
            due = {i: v for i, v in packed.items() if buckets.layouts[i].goes_to(worker)}
            assert one.checksums() == due
    assert fault or (room[0] == room[1] and all(len(set(parts)) == 2 for parts in room[0])), "made anew in each sync"
    for engine in engines:
        for one in engine.workers:
            one.leave()
            assert not one._room
    return wrong, sorted(to.errors)


@pytest.mark.parametrize(
    ("fault", "timeout_s"), [("", 60.0), ("refuses", 6.0), pytest.param("gone", 20.0, marks=pytest.mark.full)]
)
def test_workers_of_a_fleet_get_their_share(fault: str, timeout_s: float) -> None:
    """An engine whose worker ends in the middle of the second sync, or that does not begin it, breaks all
    communicators; the other one gets its weights in new ones. gloo's communicators of threads notice after their time
    limit, once or three times."""
    (wrong, failed), _ = run_ranks(broadcast, 2, fault, timeout_s)
    assert wrong == ({"a": [[], []]} if fault else {"a": [[], []], "b": [[], []]})
    assert failed == (["b"] if fault else [])


def test_members_of_a_share_alone_get_what_is_sent_to_it() -> None:
    meeting = Meeting("127.0.0.1")
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
