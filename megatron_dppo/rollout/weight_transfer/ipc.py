"""Weights to engines that share the trainer's GPUs: every rank fills a buffer that the worker on its GPU reads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from megatron_dppo.checkpoint.weight_buckets import WeightBuckets
from megatron_dppo.rollout.engine import EngineClient, RolloutEngine, TransferTerms
from megatron_dppo.rollout.weight_transfer.cuda_ipc import gpu_uuid, share, take_back
from megatron_dppo.rollout.weight_transfer.manifest import Packed
from megatron_dppo.rollout.weight_transfer.recipients import Pending, Recipients


class IpcSender:
    """NCCL refuses two ranks on one GPU, CUDA's inter-process memory does not.

    Two buffers alternate: while the workers load one bucket, the ranks bring the next together. A buffer is read only
    after its writer's stream is done with it, and written again only after every worker is. Memory: two buckets on
    every GPU, during a sync.
    """

    def __init__(self, buckets: WeightBuckets, device: torch.device) -> None:
        self._buckets, self._device = buckets, device
        self._told: set[str] = set()
        """Engines that know the layouts."""
        self.packed = Packed()

    def send(self, version: int, to: Recipients | None) -> None:
        """Collective over the trainer; `to` on the controller, rank 0, alone."""
        buckets, device = self._buckets, self._device
        buffers = [torch.empty(buckets.largest, dtype=torch.uint8, device=device) for _ in range(2)]
        shared = share(buffers)
        handles: list[tuple[str, bytes]] = [("", b"")] * dist.get_world_size()
        dist.all_gather_object(handles, (gpu_uuid(device), shared))
        if to is not None:
            told = to.wait(to.ask_each(lambda engine: self._terms(engine, dict(handles))))
            self._told |= told.keys()
        loading: Pending[None] | None = None
        for index in range(len(buckets.layouts)):
            buckets.spread(index, buffers[index % 2])
            self.packed.note(index, buckets.layouts[index], buffers[index % 2])
            torch.cuda.current_stream(device).synchronize()
            if to is not None:
                to.wait(loading)  # it reads the other buffer, which the next turn writes
            dist.barrier()
            if to is not None:
                loading = to.ask(partial(_receive_shared, version=version, number=index))
        if to is not None:
            to.wait(loading)
            to.wait(to.ask(lambda engine: engine.agree(TransferTerms(close=True))))
        dist.barrier()
        take_back(shared)  # this GPU's engine may be down, or not among those that get these weights
        del buffers
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()

    def close(self) -> None:
        """Nothing stays open between syncs."""

    def _terms(self, engine: EngineClient, handles: dict[str, bytes]) -> Callable[[RolloutEngine], None]:
        terms = TransferTerms(layouts=None if engine.name in self._told else self._buckets.layouts, buffers=handles)
        return lambda one: one.agree(terms)


def _receive_shared(engine: RolloutEngine, *, version: int, number: int) -> None:
    engine.receive_shared(version, number)
