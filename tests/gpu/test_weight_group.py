"""What a fleet's sync leaves of a GPU's memory, and what its small parts wait for."""

from __future__ import annotations

import pytest
import torch

from megatron_dppo.checkpoint.weight_layout import BucketLayout, Segment
from megatron_dppo.rollout.engine import TransferTerms
from megatron_dppo.rollout.weight_transfer.group import MeetingStore, WeightGroup
from megatron_dppo.rollout.weight_transfer.incoming import Incoming
from megatron_dppo.rollout.weight_transfer.manifest import values_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GIB = 1 << 30


def test_a_worker_gives_back_what_it_had_and_keeps_two_buckets() -> None:
    device, size = torch.device("cuda", 0), 64 << 20
    torch.empty(2 * GIB, dtype=torch.uint8, device=device)  # and freed: it stays in torch's cache
    before = torch.cuda.memory_reserved(device)
    layouts = [BucketLayout(slots=(), size=size, segments=(Segment(0, 0, size),)) for _ in range(3)]
    worker, meeting = Incoming(device), MeetingStore("127.0.0.1")
    worker.agree(TransferTerms(layouts=layouts, group=meeting.next(1, 60.0), first_rank=0, source_rank={0: 0}))
    # A byte went over the communicator, for which torch takes two mebibytes.
    assert torch.cuda.memory_reserved(device) <= before - 2 * GIB + (2 << 20)
    places, held = [], []
    for _ in range(2):
        worker.begin()
        worker.take("group", lambda slots, payload: None)
        places.append([part.data_ptr() for part in worker._room])
        held.append(torch.cuda.memory_allocated(device))
    assert places[0] == places[1]
    assert len(set(places[0])) == 2
    worker.leave()
    assert held[1] - torch.cuda.memory_allocated(device) >= 2 * size


def test_broadcasts_go_before_what_else_a_gpu_has_to_do() -> None:
    meeting = MeetingStore("127.0.0.1")  # its store is there as long as it is
    group = WeightGroup(meeting.next(1, 60.0), 0, torch.device("cuda", 0))
    assert group._groups[None].options.is_high_priority_stream
    group.abort()


def test_checksums_do_not_wait_for_copies_to_the_host() -> None:
    device = torch.device("cuda", 0)
    source = torch.zeros(GIB, dtype=torch.uint8, device=device)
    host = torch.empty(GIB, dtype=torch.uint8).pin_memory()
    sums = dict(enumerate((torch.arange(40, device=device) * 2**40 - 3).unbind()))
    expected = {number: number * 2**40 - 3 for number in range(40)}
    assert values_of(sums) == expected  # the first one makes its memory
    side = torch.cuda.Stream(device)
    with torch.cuda.stream(side):
        for _ in range(16):  # 0.3 s
            host.copy_(source, non_blocking=True)
        copied = side.record_event()
    assert values_of(sums) == expected
    assert not copied.query()
    side.synchronize()
