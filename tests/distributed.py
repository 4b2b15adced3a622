"""Run a test function on several gloo ranks of this machine."""

from __future__ import annotations

import datetime
import gc
import multiprocessing
import os
import pickle
import queue
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

PATIENCE_S = 400.0
"""How long a test waits for what must come: many times what a slow machine takes, below pytest's own limit (600 s)."""

PRELOAD = [
    "torch.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.core.dist_checkpointing",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "megatron_dppo.actor.actor",
    "megatron_dppo.checkpoint.convert",
    "megatron_dppo.models.lora.attach",
    "pytest",
]
"""Imported once, by the server that ranks are forked from: a rank then starts in a tenth of a second, not in ten."""


def _rank_main(
    fn: Callable[..., Any], rank: int, world_size: int, port: int, timeout: float, results: Any, args: tuple[Any, ...]
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    torch.set_num_threads(1)
    gc.freeze()  # what the server imported stays: the collector need not look through it again and again
    try:
        patience = datetime.timedelta(seconds=timeout)
        store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False, timeout=patience)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=patience)
        results.put((rank, True, pickle.dumps(fn(rank, *args))))  # not by memory of a process that may be gone
        dist.barrier()  # nobody tears its sockets down while another rank still computes
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
        raise SystemExit(1) from None


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = PATIENCE_S) -> list[Any]:
    """Call `fn(rank, *args)` in `world_size` processes that share a gloo process group; the results in rank order.

    `fn` is a module-level function and its arguments and results can be pickled. The first rank that raises fails the
    call with its traceback, and the other ranks are ended; so does `timeout` seconds without all results.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
    results = context.Queue()
    ranks: list[BaseProcess] = [
        context.Process(
            target=_rank_main, args=(fn, rank, world_size, store.port, timeout, results, args), daemon=False
        )
        for rank in range(world_size)
    ]
    deadline = time.monotonic() + timeout
    values: dict[int, Any] = {}
    try:
        for process in ranks:
            process.start()
        while len(values) < world_size:
            try:
                rank, ok, value = results.get(timeout=0.2)
            except queue.Empty:
                dead = [r for r, p in enumerate(ranks) if r not in values and p.exitcode not in (None, 0)]
                if dead and results.empty():
                    raise AssertionError(
                        f"ranks {dead} of {world_size} died: exit codes {[ranks[r].exitcode for r in dead]}"
                    ) from None
                if time.monotonic() > deadline:
                    raise AssertionError(
                        f"no result of ranks {sorted(set(range(world_size)) - set(values))} within {timeout:.0f} s"
                    ) from None
                continue
            if not ok:
                raise AssertionError(f"rank {rank} of {world_size} failed:\n{value}")
            values[rank] = pickle.loads(value)
        for process in ranks:
            process.join(timeout=30)
        return [values[rank] for rank in range(world_size)]
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
                process.join()
