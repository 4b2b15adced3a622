"""CUDA, NCCL and the wires between GPUs. Runs only where there is a GPU, or where one is expected."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from datetime import timedelta

from megatron_dppo.launch.nodes import listed_gpus, ranks_in_all_and_here
from megatron_dppo.preflight.finding import Finding, error, warning

DRIVER = 580
"""The first driver branch for CUDA 13."""
PEER_BANDWIDTH = 20e9
"""Bytes/s between two GPUs of a node below which something is wrong (PCIe gen 5 gives 50e9, NVLink 300e9 and more)."""


def check_cuda(expected: bool) -> Iterator[Finding]:
    """Driver, torch's CUDA and NCCL."""
    listed = listed_gpus()
    if not listed:
        if expected:
            yield error(
                "gpu", "no GPU is listed by nvidia-smi", "install the driver, or start the container with --gpus all"
            )
        return
    yield from _driver()
    import torch

    if not torch.cuda.is_available():
        yield error(
            "cuda",
            f"nvidia-smi lists {listed} GPUs, but torch {torch.__version__} cannot use them",
            "check CUDA_VISIBLE_DEVICES, and that the driver is of branch 580 or later",
        )
        return
    if not torch.distributed.is_nccl_available():
        yield error("nccl", "torch was built without NCCL", "install torch from PyPI, as constraints/gpu.txt pins it")
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        if capability < (8, 0):
            yield error(
                "gpu", f"GPU {index} has compute capability {capability}, without bf16", "use A100, H100 or later"
            )
        free, total = torch.cuda.mem_get_info(index)
        if free < 0.9 * total:
            yield warning(
                "gpu-memory",
                f"GPU {index} has {free / 2**30:.0f} of {total / 2**30:.0f} GiB free: another process uses it",
                "end it, or choose other GPUs",
            )


def _driver() -> Iterator[Finding]:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout.split()
    branch = found[0].split(".")[0] if found else ""
    if branch.isdigit() and int(branch) < DRIVER:
        yield error("driver", f"driver {found[0]} is older than {DRIVER}, which CUDA 13 needs", "update the driver")


def check_peers() -> Iterator[Finding]:
    """Every pair of GPUs of this node: direct access, and how fast 256 MiB get across."""
    import torch

    for a in range(torch.cuda.device_count()):
        for b in range(a + 1, torch.cuda.device_count()):
            if not torch.cuda.can_device_access_peer(a, b):
                yield warning(
                    "peer-access",
                    f"GPUs {a} and {b} cannot reach each other's memory: NCCL copies through the host",
                    "check `nvidia-smi topo -m`, IOMMU and ACS settings",
                )
                continue
            speed = _copy_speed(a, b)
            if speed < PEER_BANDWIDTH:
                yield warning(
                    "peer-bandwidth",
                    f"GPU {a} to {b}: {speed / 1e9:.0f} GB/s",
                    "check `nvidia-smi nvlink -s` and that no other job uses the GPUs",
                )


def _copy_speed(a: int, b: int) -> float:
    import torch

    size = 256 << 20
    source, target = (torch.empty(size, dtype=torch.uint8, device=f"cuda:{index}") for index in (a, b))
    for _ in range(2):
        target.copy_(source)
    torch.cuda.synchronize(a)
    torch.cuda.synchronize(b)
    start = time.perf_counter()
    for _ in range(4):
        target.copy_(source)
    torch.cuda.synchronize(a)
    torch.cuda.synchronize(b)
    return 4 * size / (time.perf_counter() - start)


LEAST_WITHIN, LEAST_BETWEEN = 50e9, 5e9
"""Bytes/s of an all-reduce within a node (NVLink) and between nodes (one 100 Gb/s card); GPUs only."""
_SIZE, _SIZE_ON_CPU = 256 << 20, 16 << 20


def check_bandwidth(least: float | None = None) -> Iterator[Finding]:
    """Bus bandwidth of an all-reduce over all ranks, `2 (n - 1) / n size / time`. Collective: started by torchrun.

    `least` in bytes/s replaces the thresholds; on a CPU there is none without it. Only rank 0 reports.
    """
    import torch
    import torch.distributed as dist

    from megatron_dppo.launch.network import init_process_group

    (world, here), rank = ranks_in_all_and_here(), int(os.environ["RANK"])
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    started_here = not dist.is_initialized()
    if started_here:
        init_process_group("nccl" if on_gpu else "gloo", timedelta(minutes=5))
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
