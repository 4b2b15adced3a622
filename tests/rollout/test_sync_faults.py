"""What one engine or one rank fails with in a weight sync, and what the others see of it."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from megatron_dppo.checkpoint.weight_layout import BucketLayout, Segment
from megatron_dppo.rollout.engine import EngineClosed, TransferTerms
from megatron_dppo.rollout.event_loop import EventLoop
from megatron_dppo.rollout.serving.weight_updates import Gate, WeightUpdates
from megatron_dppo.rollout.weight_transfer import ipc
from megatron_dppo.rollout.weight_transfer.broadcast import BroadcastSender
from megatron_dppo.rollout.weight_transfer.group import MeetingStore, WeightGroup
from megatron_dppo.rollout.weight_transfer.incoming import Incoming
from megatron_dppo.rollout.weight_transfer.ipc import IpcSender
from megatron_dppo.rollout.weight_transfer.manifest import Manifest
from megatron_dppo.rollout.weight_transfer.recipients import Recipients
from megatron_dppo.rollout.weight_transfer.turns import Emptying
from tests.distributed import PATIENCE_S, run_ranks
from tests.rollout.weight_parts import CPU, Collected, Engine, Summed, buckets_on


def broadcast(
    rank: int, faults: dict[str, str], timeout_s: float
) -> tuple[dict[str, list[list[str]]], list[str], float, int]:
    """Two syncs to a fleet, whose engines have `faults` in the second: what is wrong with each worker of each engine
    after it, which engines failed in it, its seconds, and how many places this rank wrote buckets to."""
    buckets = buckets_on(rank, 2)
    control = dist.new_group()
    sender = BroadcastSender(buckets, CPU, workers_per_engine=2, timeout_s=timeout_s, control=control)
    engines = [Engine(name) for name in faults]
    clients: Any = engines
    room: list[list[list[int]]] = []
    write = buckets.write

    def counted(index: int, payload: torch.Tensor) -> None:
        places.add(payload.data_ptr())
        write(index, payload)

    buckets.write = counted  # type: ignore[method-assign]
    for version in (1, 2):
        to = Recipients(clients, timeout_s=60.0) if rank == 0 else None
        if version == 2:
            for engine in engines:
                engine.fault = faults[engine.name]
        places: set[int] = set()
        begun = time.monotonic()
        sender.begin(version, to)
        packed = sender.send(version, to)
        took = time.monotonic() - begun
        room.append([[part.data_ptr() for part in one._room] for engine in engines for one in engine.workers])
    sender.close()
    if to is None:
        return {}, [], took, len(places)
    wrong = {}
    for engine in to.engines:
        mine: Any = engine
        wrong[engine.name] = [one.wrong(worker) for worker, one in enumerate(mine.workers)]
        for worker, one in enumerate(mine.workers):
            due = {i: v for i, v in packed.items() if buckets.layouts[i].goes_to(worker)}
            assert one.checksums() == due
    if not any(faults.values()):
        assert room[0] == room[1], "made anew in each sync"
        assert all(len(set(parts)) == 2 for parts in room[0])
    for engine in engines:
        for one in engine.workers:
            one.leave()
            assert not one._room
    return wrong, sorted(to.errors), took, len(places)


@pytest.mark.parametrize(
    ("faults", "lost", "timeout_s"),
    [
        ({"a": "", "b": ""}, [], 60.0),
        pytest.param({"a": "", "b": "gone"}, ["b"], 20.0, marks=pytest.mark.full),
        ({"a": "", "b": "refuses"}, ["b"], 60.0),  # the others do not wait for it in the communicator
        ({"a": "breaks twice"}, [], 60.0),  # the only engine has all attempts
        ({"a": "breaks twice", "b": ""}, ["a"], 60.0),
        ({"a": "breaks once", "b": "alone"}, ["b"], 6.0),  # not the one that failed the attempt before
    ],
)
def test_workers_of_a_fleet_get_their_share(faults: dict[str, str], lost: list[str], timeout_s: float) -> None:
    """An engine with a fault in the second sync is left out, whatever else breaks; the others get their weights, in new
    communicators. gloo's communicators of threads notice after their time limit that a member ended or did not come."""
    (wrong, failed, took, places), (_, _, _, others) = run_ranks(broadcast, 2, faults, timeout_s)
    assert wrong == {name: [[], []] for name in faults if name not in lost}
    assert failed == lost
    assert places == others == 2, "each attempt has memory of its own"
    if timeout_s == 60.0:
        assert took < timeout_s / 2, "something waited for its time limit"


def unwritten(rank: int) -> tuple[list[str], list[int], list[list[str]]]:
    """A sync in whose first buckets rank 1 fails, after and before one in which it does not: what each raised, the
    buckets that this rank kept, and what is wrong with the workers at the end."""
    buckets, engine = buckets_on(rank, 2), Engine("a")
    sender = BroadcastSender(buckets, CPU, workers_per_engine=2, timeout_s=60.0, control=dist.new_group())
    write, clients = buckets.write, cast(Any, [engine])
    raised, kept = [], []

    def fails(index: int, payload: torch.Tensor) -> None:
        raise RuntimeError("CUDA out of memory")

    for version in (1, 2, 3):
        to = Recipients(clients, timeout_s=60.0) if rank == 0 else None
        buckets.write = fails if version == 2 and rank == 1 else write  # type: ignore[method-assign]
        begun = time.monotonic()
        try:
            sender.begin(version, to)
            sender.send(version, to)
            raised.append("")
        except RuntimeError as error:
            raised.append(str(error))
        assert time.monotonic() - begun < 30.0, "a rank waited for another's time limit"
        kept.append(len(sender._room))
    sender.close()
    return raised, kept, [one.wrong(number) for number, one in enumerate(engine.workers)] if rank == 0 else []


def test_a_rank_that_cannot_write_its_first_buckets_is_heard_of_at_once() -> None:
    for raised, kept, wrong in run_ranks(unwritten, 2):
        why = "rank 1 failed in a weight broadcast: RuntimeError: CUDA out of memory"
        assert raised == ["", why, ""]
        assert kept == [0, 0, 0]
        assert not any(wrong)


def test_a_member_that_gives_up_tells_those_that_wait() -> None:
    """`WeightGroup.finish` asks for it, on GPUs alone."""
    meeting = MeetingStore("127.0.0.1")
    where = meeting.next(2, 20.0)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda rank: WeightGroup(where, rank, CPU), range(2))
    assert not second._meeting.check(["given up"])
    first.give_up()
    assert first.closed
    second._meeting.wait(["given up"], timedelta(seconds=PATIENCE_S))  # a store's `set` returns before it is done
    second.abort()


def test_a_worker_that_cannot_load_tells_those_that_wait() -> None:
    meeting = MeetingStore("127.0.0.1")
    where, worker = meeting.next(2, 20.0), Incoming(CPU)
    layouts = [BucketLayout(slots=(), segments=(Segment(0, 0, 64),), size=64)]

    def fails(slots: Any, payload: torch.Tensor) -> None:
        raise MemoryError

    def receive() -> None:
        worker.agree(TransferTerms(layouts=layouts, group=where, first_rank=1, source_rank={0: 0}))
        worker.take("group", fails)

    with ThreadPoolExecutor(1) as threads:
        receiving = threads.submit(receive)
        sender = WeightGroup(where, 0, CPU)
        sender.wait([sender.broadcast(torch.zeros(64, dtype=torch.uint8), 0)])
        with pytest.raises(MemoryError):
            receiving.result(PATIENCE_S)
    sender._meeting.wait(["given up"], timedelta(seconds=PATIENCE_S))
    sender.abort()


class Slow:
    """An engine of one worker on the rank's GPU, and its own client. With `hangs` it does not answer `agree` before
    that is set. `shared`: the rank's buffers, of the same process."""

    def __init__(self, name: str, shared: list[torch.Tensor], hangs: threading.Event | None = None) -> None:
        self.name, self._shared, self._hangs = name, shared, hangs
        self.worker = Collected(0, TransferTerms())
        self._calls = ThreadPoolExecutor(1)

    def ask(self, call: Callable[[Any], Any], lane: str) -> Future[Any]:
        return self._calls.submit(call, self)

    def begin_update(self, version: int) -> None:
        self.worker.begin()

    def agree(self, terms: TransferTerms) -> None:
        if self._hangs is not None:
            self._hangs.wait(PATIENCE_S)
            raise RuntimeError("hung")
        self.worker.agree(TransferTerms(layouts=terms.layouts), 0)
        self.worker._buffers = list(self._shared)
        self.worker._turns = Emptying(*pickle.loads(terms.buffers["gpu"]))

    def receive_shared(self, version: int) -> None:
        self.worker.take("shared", self.worker.keep)


def beside_a_slow_one(rank: int, timeout_s: float) -> tuple[list[str], dict[str, str]]:
    """A colocated sync of a healthy engine and one that hangs: what is wrong with the healthy one, and who failed."""
    shared: list[torch.Tensor] = []
    cuda: Any = ipc  # what of it is CUDA's own
    cuda.gpu_uuid, cuda.take_back, torch.cuda.ipc_collect = lambda _: "gpu", lambda _: None, lambda: None
    cuda.share = lambda buffers, turns, limit: (shared.extend(buffers), (turns, limit))[1]
    buckets, hangs = buckets_on(0, 1), threading.Event()
    spread = buckets.spread

    def late(*args: Any) -> None:
        time.sleep(0.1)
        spread(*args)

    buckets.spread = late  # type: ignore[method-assign]
    engines: Any = [Slow("a", shared), Slow("b", shared, hangs)]
    to = Recipients(engines, timeout_s=timeout_s)
    sender = IpcSender(buckets, CPU, timeout_s=timeout_s)
    sender.begin(1, to)
    sender.send(1, to)
    hangs.set()
    return engines[0].worker.wrong(0), {name: str(error) for name, error in to.errors.items()}


def test_a_slow_engine_takes_no_time_from_the_others() -> None:
    """Their time limit for the first bucket begins when the slow one has been given up."""
    ((wrong, failed),) = run_ranks(beside_a_slow_one, 1, 2.0)
    assert failed == {"b": "no answer within 2 s"}
    assert wrong == []


def test_a_sync_that_begins_or_ends_while_a_request_comes_does_not_refuse_it() -> None:
    loop, core = EventLoop("gate"), Summed()
    anyone: Any = core

    class Looks(Gate):
        """Somebody looks after each change, and another change comes while somebody looks."""

        ending: Callable[[], Any] | None = None

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if hasattr(self, "_inside"):
                self.check()

        @property
        def syncing(self) -> bool:
            if self.ending is not None:
                self.ending, ending = None, self.ending
                ending()
            return self._syncing

        @syncing.setter
        def syncing(self, value: bool) -> None:
            self._syncing = value

    try:
        gate = Looks(None)
        engine = WeightUpdates(anyone, loop, gate, Manifest(None), cut=False, timeout_s=PATIENCE_S)
        engine.begin_update(1)
        gate.__dict__["ending"] = lambda: engine.end_update(1, {})
        gate.check()
        assert gate.shut is None
        assert gate.version == 1
    finally:
        loop.stop()


def test_who_was_cut_waits_for_a_sync_that_is_repeated() -> None:
    """Another engine ended in it, and broke the communicator. Refused, the fleet would give this one up as well."""

    class Breaks(Summed):
        async def load(self, version: int, what: Any) -> None:
            raise RuntimeError("another member gave up")

    loop, core = EventLoop("cut"), Breaks()
    anyone: Any = core
    gate = Gate(None)
    engine = WeightUpdates(anyone, loop, gate, Manifest(None), cut=True, timeout_s=PATIENCE_S)
    try:
        engine.begin_update(1)
        with ThreadPoolExecutor(2) as threads:
            cut = threads.submit(loop.run, gate.passable(), PATIENCE_S)
            with pytest.raises(RuntimeError, match="another member"):
                engine.receive_group(1)
            assert not wait([cut], timeout=0.2).done
            with pytest.raises(EngineClosed, match="weight version 1 died"):
                gate.check()
            engine.begin_update(1)
            engine.end_update(1, {})
            cut.result(PATIENCE_S)
            engine.begin_update(2)
            engine.abandon_update(2, "the trainer ended")
            gate.shut = "the engine is closed"
            with pytest.raises(EngineClosed, match="closed"):
                loop.run(gate.passable(), PATIENCE_S)
    finally:
        loop.stop()


def test_an_engine_that_cannot_join_names_the_sync_that_it_is_for() -> None:
    class Alone(Summed):
        async def agree(self, terms: TransferTerms) -> None:
            raise RuntimeError("nobody there")

    loop = EventLoop("join")
    core: Any = Alone()
    gate = Gate(None)
    engine = WeightUpdates(core, loop, gate, Manifest(None), cut=False, timeout_s=PATIENCE_S)
    try:
        for version in (3, 3, 5):  # begun again after it died, then another, which need not be the next number
            engine.begin_update(version)
            with pytest.raises(RuntimeError, match="nobody there"):
                engine.agree(TransferTerms())
            with pytest.raises(EngineClosed, match=f"the sync to weight version {version} died"):
                gate.check()
    finally:
        loop.stop()


class Told(Engine):
    """Cannot learn the first layouts that it is told."""

    told = 0

    def agree(self, terms: TransferTerms) -> None:
        self.told += terms.layouts is not None
        if self.told == 1:
            raise RuntimeError("CUDA out of memory")
        super().agree(terms)


def told_again(rank: int) -> tuple[int, list[list[str]]]:
    buckets, engine = buckets_on(rank, 1), Told("a")
    sender = BroadcastSender(buckets, CPU, workers_per_engine=2, timeout_s=6.0)
    to = Recipients(cast(Any, [engine]), timeout_s=60.0)
    sender.begin(1, to)
    sender.send(1, to)
    sender.close()
    assert not to.errors, to.errors
    return engine.told, [one.wrong(number) for number, one in enumerate(engine.workers)]


def test_layouts_that_an_engine_could_not_take_are_told_again() -> None:
    assert run_ranks(told_again, 1) == [(2, [[], []])]
