"""The communicator of trainer ranks and workers, its members as threads of one process (gloo)."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megatron_dppo.rollout.weight_transfer.group import GroupClosed, Meeting, WeightGroup
from tests.distributed import PATIENCE_S

CPU = torch.device("cpu")


def test_members_receive_what_each_source_sends() -> None:
    meeting = Meeting("127.0.0.1")
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
    meeting = Meeting("127.0.0.1")
    with pytest.raises(GroupClosed, match="not all 2 members of a weight broadcast came together"):
        WeightGroup(meeting.next(2, 0.5), 0, CPU)


def test_a_member_that_leaves_breaks_the_broadcast_for_the_others() -> None:
    meeting = Meeting("127.0.0.1")
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
