"""The communicator of trainer ranks and workers, its members as threads of one process (gloo)."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_dppo.rollout.engine import Rendezvous
from megatron_dppo.rollout.weight_transfer.group import GroupClosed, MeetingStore, WeightGroup
from tests.distributed import PATIENCE_S

CPU = torch.device("cpu")


def test_members_receive_what_each_source_sends() -> None:
    meeting = MeetingStore("127.0.0.1")
    for size in (2, 3):  # a second communicator on the same store
        where = meeting.next(size, 20.0)

        def member(rank: int, where=where) -> list[int]:
            group = WeightGroup(where, rank, CPU)
            parts = [torch.full((1000,), rank + 1, dtype=torch.uint8) for _ in range(2)]
            group.wait([group.broadcast(part, source) for source, part in enumerate(parts)])
            group.finish()
            group.abort()
            return [int(part.unique()) for part in parts]

        with ThreadPoolExecutor(size) as threads:
            assert list(threads.map(member, range(size))) == [[1, 2]] * size


def test_a_member_that_does_not_come_is_waited_for_no_longer_than_the_timeout() -> None:
    meeting = MeetingStore("127.0.0.1")
    with pytest.raises(GroupClosed, match="not all 2 members of a weight broadcast came together"):
        WeightGroup(meeting.next(2, 0.5), 0, CPU)


def test_all_parts_of_connecting_have_one_timeout() -> None:
    """A member says late that it is there, and then does not connect: to wait anew for that would be 11.4 s."""
    meeting, timeout_s = MeetingStore("127.0.0.1"), 6.0
    where = meeting.next(2, timeout_s)
    store = dist.PrefixStore(where.key, dist.TCPStore(where.host, where.port, is_master=False))
    late = threading.Timer(0.9 * timeout_s, lambda: store.set("here-1", "1"))
    begun = time.monotonic()
    late.start()
    with pytest.raises(GroupClosed, match="not all 2 members of a weight broadcast came together"):
        WeightGroup(where, 0, CPU)
    assert time.monotonic() - begun < 1.6 * timeout_s
    late.join()


def test_a_broadcast_has_all_of_the_timeout_however_late_the_members_came() -> None:
    meeting, timeout_s = MeetingStore("127.0.0.1"), 6.0
    where = meeting.next(2, timeout_s)

    def member(rank: int) -> int:
        time.sleep(0.6 * timeout_s * rank)
        group = WeightGroup(where, rank, CPU)
        time.sleep(0.6 * timeout_s * rank)
        part = torch.full((1000,), rank, dtype=torch.uint8)
        group.wait([group.broadcast(part, 1)])
        group.abort()
        return int(part.unique())

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(member, range(2))) == [1, 1]


def test_a_member_that_leaves_breaks_the_broadcast_for_the_others() -> None:
    meeting = MeetingStore("127.0.0.1")
    where = meeting.next(2, 3.0)
    both = threading.Barrier(2)

    def member(rank: int) -> None:
        group = WeightGroup(where, rank, CPU)
        both.wait(PATIENCE_S)
        if rank == 1:
            group.abort()
            return
        with pytest.raises(GroupClosed, match="broke"):
            group.wait([group.broadcast(torch.zeros(1 << 20, dtype=torch.uint8), 1)])
        assert group.closed

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(member, range(2)))


class _Ends(WeightGroup):
    """A member whose process ends when it has said that it is there."""

    def __init__(self, where: Rendezvous, rank: int, moment: str, imported: Any) -> None:
        self._moment = moment
        imported.set()
        super().__init__(where, rank, CPU)

    def _communicator(self, store: Any, *sizes: Any) -> Any:
        if self._moment == "its share" and self._groups:
            os._exit(0)
        return super()._communicator(store, *sizes)

    def _connect(self) -> None:
        os._exit(0)


def test_a_worker_that_ends_while_shares_connect_is_found_out_in_time() -> None:
    """NCCL would make the connections of a share in the middle of the first sync, without a time limit. The member of
    another share finds out as well."""
    meeting, timeout_s, context = MeetingStore("127.0.0.1"), 5.0, mp.get_context("spawn")
    cases = []
    for moment in ("its share", "its first word"):
        where, imported = meeting.next(3, timeout_s, shares=((0, 1), (0, 2))), context.Event()
        worker = context.Process(target=_Ends, args=(where, 2, moment, imported))
        worker.start()
        cases.append((where, worker, imported))

    def member(where: Rendezvous, rank: int, imported: Any) -> float:
        assert imported.wait(PATIENCE_S)
        begun = time.monotonic()
        with pytest.raises(GroupClosed, match="not all 3 members of a weight broadcast came together"):
            WeightGroup(where, rank, CPU)
        return time.monotonic() - begun

    with ThreadPoolExecutor(4) as threads:
        took = [threads.submit(member, where, rank, event) for where, _, event in cases for rank in range(2)]
    # Far from it, for busy machines; torch's own limits are 5 minutes and more.
    assert max(one.result() for one in took) < timeout_s + 60
    for _, worker, _ in cases:
        worker.join(PATIENCE_S)
        assert worker.exitcode == 0
