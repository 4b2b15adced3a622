"""How fast the ranks of a torchrun job talk to each other."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta

from megatron_dppo.launch.nodes import ranks_in_all_and_here
from megatron_dppo.preflight.finding import Finding, error

LEAST_WITHIN, LEAST_BETWEEN = 50e9, 5e9
"""Bytes/s of an all-reduce within a node (NVLink) and between nodes (one 100 Gb/s card); GPUs only."""
_SIZE, _SIZE_ON_CPU = 256 << 20, 16 << 20


def check_bandwidth(least: float | None = None) -> Iterator[Finding]:
    """Bus bandwidth of an all-reduce over all ranks, `2 (n - 1) / n size / time`. Collective: started by torchrun.

    `least` in bytes/s replaces the thresholds; on a CPU there is none without it. Only rank 0 reports.
    """
    import torch
    import torch.distributed as dist

    (world, here), rank = ranks_in_all_and_here(), int(os.environ["RANK"])
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    started_here = not dist.is_initialized()
    if started_here:
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(minutes=5))
    speed = all_reduce_speed(world, on_gpu)
    if started_here:
        dist.destroy_process_group()
    nodes = max(1, world // here)
    if least is None:
        least = (LEAST_BETWEEN if nodes > 1 else LEAST_WITHIN) if on_gpu else 0.0
    if rank == 0 and speed < least:
        where = f"{world} ranks on {nodes} node{'s' if nodes > 1 else ''}"
        yield error(
            "bandwidth",
            f"an all-reduce over {where} runs at {speed / 1e9:.2f} GB/s, less than {least / 1e9:.2f}",
            "run with NCCL_DEBUG=INFO: it must choose IB or NVLink; set NCCL_IB_HCA and NCCL_SOCKET_IFNAME",
        )


def all_reduce_speed(world: int, on_gpu: bool) -> float:
    import torch
    import torch.distributed as dist

    tensor = torch.ones((_SIZE if on_gpu else _SIZE_ON_CPU) // 4, device="cuda" if on_gpu else "cpu")

    def once() -> float:
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    once()
    seconds = sorted(once() for _ in range(5))[2]
    return 2 * (world - 1) / world * tensor.numel() * 4 / seconds
