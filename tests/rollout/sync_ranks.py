"""What trainer ranks do in a test of the weight sync: shards of a checkpoint to engines that run elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import ray
import torch
import torch.distributed as dist

from megatron_dppo.checkpoint.hf_export import weight_exporter
from megatron_dppo.rollout.engine import Lane, RolloutEngine
from megatron_dppo.rollout.fleet.host import future_of
from megatron_dppo.rollout.fleet.object_store import ObjectStoreSender
from megatron_dppo.rollout.ray_session import RayAddress, RaySession
from megatron_dppo.rollout.weight_transfer.broadcast import BroadcastSender
from megatron_dppo.rollout.weight_transfer.recipients import Recipients
from tests.megatron import build_from


@dataclass
class Client:
    """The client of an engine in another process than the one that made it."""

    name: str

    def ask(self, call: Callable[[RolloutEngine], Any], lane: Lane) -> Future[Any]:
        return future_of(ray.get_actor(self.name).run.options(concurrency_group=lane).remote(call))


def sync(
    rank: int,
    where: RayAddress,
    names: list[str],
    layout: dict[str, Any],
    syncs: list[tuple[str, int, str]],
    workers: int = 1,
    bucket_bytes: int = 100_000,
    shares: int = 1,
    sliced: bool = False,
) -> dict[str, str]:
    """Send checkpoints to engines. `syncs`: (folder, version, way). Returns on rank 0 which engines failed, and why."""
    session = RaySession.connect(where) if rank == 0 else None
    models, model, groups = build_from(syncs[0][0], layout)
    exporter = weight_exporter(models, model, groups)
    buckets = exporter.buckets(bucket_bytes, shares, sliced=sliced)
    senders: dict[str, Any] = {
        "broadcast": BroadcastSender(buckets, torch.device("cpu"), workers_per_engine=workers, timeout_s=60),
        "object_store": ObjectStoreSender(exporter.buckets(bucket_bytes), torch.device("cpu")),
    }
    failed: dict[str, str] = {}
    from megatron_dppo.checkpoint.hf_import import load_hf_weights
    from megatron_dppo.models.hf_config import load_hf_config

    for folder, version, way in syncs:
        load_hf_weights(models, load_hf_config(folder), groups)
        to = None
        if rank == 0:
            to = Recipients([Client(name) for name in names if name not in failed], timeout_s=60)
        senders[way].begin(version, to)
        packed = senders[way].send(version, to)
        if to is not None:
            assert way == "object_store" or sorted(packed) == list(range(len(buckets.layouts))), to.errors
            to.wait(to.ask(lambda engine: engine.end_update(version, packed)))  # noqa: B023
            failed |= {name: f"{type(error).__name__}: {error}" for name, error in to.errors.items()}
    for sender in senders.values():
        sender.close()
    dist.barrier()
    if session is not None:
        session.close()
    return failed
