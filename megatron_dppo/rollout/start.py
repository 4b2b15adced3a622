"""The engines of a run: which they are and where they live is decided here and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_dppo.batch import RolloutBatch
from megatron_dppo.checkpoint.weight_buckets import WeightBuckets
from megatron_dppo.errors import UserError
from megatron_dppo.launch.folders import require_shared_memory
from megatron_dppo.launch.imports import load_callable
from megatron_dppo.launch.nodes import ranks_in_all_and_here
from megatron_dppo.rollout.config import ENGINES, RolloutConfig
from megatron_dppo.rollout.engine import RolloutEngine, RolloutFleet
from megatron_dppo.rollout.fleet.fleet import EngineFleet
from megatron_dppo.rollout.fleet.object_store import ObjectStoreSender
from megatron_dppo.rollout.fleet.placement import find_places
from megatron_dppo.rollout.fleet.store import RolloutSource
from megatron_dppo.rollout.ray_session import RaySession
from megatron_dppo.rollout.stored import RolloutHandle
from megatron_dppo.rollout.weight_transfer.broadcast import BroadcastSender
from megatron_dppo.rollout.weight_transfer.ipc import IpcSender
from megatron_dppo.rollout.weight_transfer.recipients import WeightSender


def open_engine(model: Path, config: RolloutConfig, folder: str | None = None) -> RolloutEngine:
    """The engine that `rollout.engine` names, on this machine, its processes below this one. Blocks until it can
    generate. A user's own is looked for in `folder`, or the working folder; `UserError` where it is not there."""
    require_shared_memory()
    make = load_callable(ENGINES.get(config.engine, config.engine), named="rollout.engine: ", folder=folder)
    return make(model, config)


def transformers_opinion(
    model: Path,
    config: RolloutConfig,
    batch: RolloutBatch,
    prepare: Callable[[RolloutEngine], None] = lambda engine: None,
) -> RolloutBatch:
    """`batch` with what transformers says in float32 of the same tokens: log-probabilities and routes. `prepare` gets
    the engine before it is asked."""
    from megatron_dppo.rollout.reference.core import ReferenceEngine  # with transformers' models: not for every rank

    options: dict[str, Any] = {
        "engine": "reference",
        "dtype": "float32",
        "quantization": "none",
        "kv_cache_dtype": "auto",
        "tensor_parallel": 1,
        "expert_parallel": False,
    }
    engine = ReferenceEngine(model, config.model_copy(update=options))
    try:
        prepare(engine)
        return engine.score(batch, config.temperature)
    finally:
        engine.close()


class Ranks(Protocol):
    """What the engines need of the training ranks."""

    @property
    def device(self) -> torch.device: ...

    @property
    def is_controller(self) -> bool: ...

    def broadcast[T](self, value: T | None) -> T: ...

    def barrier(self) -> None: ...


@contextmanager
def open_fleet(
    ranks: Ranks,
    model: Path,
    config: RolloutConfig,
    *,
    namespace: str,
    logs: Path,
    made: Callable[[RolloutFleet], None] = lambda fleet: None,
) -> Iterator[RolloutFleet | None]:
    """Connects every rank to one Ray, and gives the controller its engines, which load in the background. Collective.

    Where they share the trainer's GPUs they are waited for, and put to sleep if they take turns: a model that is built
    meanwhile would take what they measure as free. `made` gets the engines while they load.
    """
    with ExitStack() as stack:
        if ranks.is_controller:
            session = RaySession.start(namespace=namespace, object_store_mib=config.object_store_mib)
            ranks.broadcast(stack.enter_context(closing(session)).where)
        else:
            stack.enter_context(closing(RaySession.connect(ranks.broadcast(None))))
        places = find_places(
            config.placement,
            engines=config.engines,
            workers=config.tensor_parallel,
            device=ranks.device,
            joined="RAY_ADDRESS" in os.environ,
            timeout_s=config.start_timeout_s,
        )
        fleet = None
        if places is not None:
            stack.callback(places.close)
            fleet = EngineFleet(
                partial(open_engine, model, config, os.getcwd()), config, options=places.options, logs=logs
            )
            stack.callback(fleet.close)
            made(fleet)
        if config.placement == "colocated":
            if fleet is not None:
                ready = fleet.ready_members()
                if config.takes_turns:
                    asleep = [member.ask(lambda engine: engine.sleep(), "weights") for member in ready]
                    for future in asleep:
                        future.result()
            ranks.barrier()
        yield fleet


def open_rollout(handle: RolloutHandle) -> RolloutSource:
    """The sequences behind a handle, on any rank that `open_fleet` connected."""
    return RolloutSource(handle)


def weight_sender(
    config: RolloutConfig, buckets: WeightBuckets, device: torch.device, control: dist.ProcessGroup | None = None
) -> WeightSender:
    """The sender of `rollout.weight_transfer`. `control`: of all ranks, for what is no weight."""
    way = config.transfer_for(device.type)
    if way == "object_store":
        return ObjectStoreSender(buckets, device)
    timeout_s = config.sync_timeout_s
    if way == "ipc":
        return IpcSender(buckets, device, timeout_s=timeout_s, lent=config.takes_turns, control=control)
    workers = config.tensor_parallel
    return BroadcastSender(buckets, device, workers_per_engine=workers, timeout_s=timeout_s, control=control)


def require_cluster() -> None:
    """UserError where ranks are on several nodes and no Ray is: one that a rank starts is its node's alone."""
    ranks, here = ranks_in_all_and_here()
    if here < ranks and not os.environ.get("RAY_ADDRESS"):
        raise UserError(
            f"torchrun started {here} of {ranks} ranks here; those of several nodes meet in one Ray: start "
            "Ray on every node and set RAY_ADDRESS to host:port of its head (docker/start_node.sh does both)"
        )
