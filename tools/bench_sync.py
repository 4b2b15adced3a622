#!/usr/bin/env python3
"""What NCCL itself needs to broadcast a number of bytes, to compare a weight sync with.

    torchrun --nproc-per-node N tools/bench_sync.py --gib 6 [--roots K] [--piece-mib 256]

Of N ranks the first K each broadcast their share of the bytes to all, in pieces: what a trainer of K ranks does for
engines of N - K workers, without packing, loading or checking anything.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

import torch
import torch.distributed as dist

from megatron_dppo.launch import exit_status
from megatron_dppo.launch.arguments import real, whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=real(), required=True, help="bytes in all")
    parser.add_argument("--roots", type=whole(), default=1, help="ranks that send (default 1)")
    parser.add_argument("--piece-mib", type=whole(), default=256, help="bytes of one broadcast (default 256)")
    parser.add_argument("--repeats", type=whole(), default=5)
    arguments = parser.parse_args()
    if "LOCAL_RANK" not in os.environ or not torch.cuda.is_available():
        parser.error("it measures NCCL: start it with torchrun on a machine with GPUs")
    if arguments.roots > int(os.environ["WORLD_SIZE"]):
        parser.error(f"argument --roots: {arguments.roots} of {os.environ['WORLD_SIZE']} ranks")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    size = arguments.piece_mib << 20
    pieces = max(1, round(arguments.gib * 2**30 / size))
    buffers = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2)]
    seconds = []
    for repeat in range(arguments.repeats + 1):
        dist.barrier()
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        for piece in range(pieces):
            dist.broadcast(buffers[piece % 2], src=piece % arguments.roots)
        torch.cuda.synchronize(device)
        if repeat:  # the first one sets connections up
            seconds.append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        best = sorted(seconds)[len(seconds) // 2]
        found = {
            "ranks": dist.get_world_size(),
            "roots": arguments.roots,
            "bytes": pieces * size,
            "seconds": seconds,
            "median_gb_per_s": pieces * size / best / 1e9,
        }
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(exit_status(main))
