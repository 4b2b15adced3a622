"""Memory shared by CUDA IPC is given back, whether or not the process that it was meant for came."""

from __future__ import annotations

import pickle
from multiprocessing.connection import Connection

import pytest
import torch
import torch.multiprocessing as mp

from megatron_dppo.rollout.weight_transfer.cuda_ipc import gpu_uuid, open_shared, share, take_back
from megatron_dppo.rollout.weight_transfer.turns import Filling

SIZE = 64 << 20


def _reader(pipe: Connection) -> None:
    device = torch.device("cuda", 0)
    buffers, turns = open_shared(pipe.recv(), device)
    turns.begin(0)
    pipe.send(int(buffers[0].sum(dtype=torch.int64)))
    turns.end(0)
    turns.close()
    del buffers
    torch.cuda.synchronize(device)
    torch.cuda.ipc_collect()
    pipe.send("closed")
    pipe.recv()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("opened", [False, True])
def test_shared_buffers_are_freed(opened: bool) -> None:
    device = torch.device("cuda", 0)
    torch.zeros(1, device=device)
    before = torch.cuda.memory_allocated(device)
    buffers = [torch.ones(SIZE, dtype=torch.uint8, device=device) for _ in range(2)]
    turns = Filling(len(buffers), timeout_s=60.0)
    shared = share(buffers, turns.path, 60.0)
    torch.cuda.synchronize(device)
    turns.end(0)
    if opened:
        context = mp.get_context("spawn")
        mine, its = context.Pipe()
        process = context.Process(target=_reader, args=(its,))
        process.start()
        mine.send({gpu_uuid(device): pickle.dumps(shared)})
        assert mine.recv() == SIZE
        turns.begin(2)  # the first buffer may be filled again
        assert mine.recv() == "closed"
    take_back(shared)
    del buffers
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated(device) == before
    if opened:
        mine.send("end")
        process.join(60)
        assert process.exitcode == 0
