"""Which GPUs of which node each engine runs on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ray
import torch
import torch.distributed as dist
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from megatron_dppo.errors import UserError
from megatron_dppo.rollout.weight_transfer.cuda_ipc import check_allocator, gpu_uuid

Placement = Literal["fleet", "colocated"]


@dataclass(frozen=True)
class RankPlace:
    """Where a trainer rank runs."""

    node: str
    """Ray's id of the node."""
    uuid: str | None
    """UUID of the GPU it trains on; None on a CPU."""
    uuids: tuple[str, ...]
    """UUIDs of all GPUs of that node that it sees."""


@dataclass(frozen=True)
class EnginePlace:
    """Where an engine runs."""

    node: str | None = None
    """Ray's id of the node; None lets Ray choose."""
    uuids: tuple[str, ...] = ()
    """UUIDs of its GPUs, in the order of its workers; () on a CPU, or where Ray hands GPUs out."""
    gpus: int = 0
    """How many GPUs Ray has to hand out."""

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the engine's processes. GPUs go by UUID, which means the same in every process: Ray shows an
        actor without GPUs of its own none, and a rank may see only some. CUDA, NVML and vLLM all take UUIDs."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(f"GPU-{uuid}" for uuid in self.uuids)} if self.uuids else {}

    def actor_options(self, group: PlacementGroup | None = None) -> dict[str, Any]:
        """Options for `RemoteEngine`; `group` is where Ray hands out its GPUs."""
        options: dict[str, Any] = {"environment": self.environment}
        if self.node is not None:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(self.node, soft=False)
        elif group is not None:
            options |= {"num_gpus": self.gpus, "scheduling_strategy": PlacementGroupSchedulingStrategy(group)}
        return options


class Places:
    """The places of a run's engines, on the controller: options of their Ray actors, and what Ray set aside."""

    def __init__(self, engines: Sequence[EnginePlace], *, timeout_s: float) -> None:
        """Raises UserError where Ray has not set the GPUs aside after `timeout_s`: other jobs of its cluster may have
        them, and the engines would wait without a word."""
        # One bundle for an engine: its workers are processes of one node.
        groups = [placement_group([{"GPU": one.gpus}], strategy="STRICT_PACK") if one.gpus else None for one in engines]
        self._groups = [group for group in groups if group is not None]
        self.options = [one.actor_options(group) for one, group in zip(engines, groups, strict=True)]
        deadline = time.monotonic() + timeout_s
        without = sum(not group.wait(max(0.0, deadline - time.monotonic())) for group in self._groups)
        if without:
            self.close()
            raise UserError(
                f"rollout.placement=fleet: {without} of {len(engines)} engines got no GPUs of the Ray cluster within "
                f"rollout.start_timeout_s={timeout_s:g}; others use them (`ray status`), or no node has "
                f"{max(one.gpus for one in engines)} at once"
            )

    def close(self) -> None:
        """Give back what Ray set aside."""
        while self._groups:
            remove_placement_group(self._groups.pop())


def find_places(
    placement: Placement, *, engines: int, workers: int, device: torch.device, joined: bool, timeout_s: float
) -> Places | None:
    """Places of all engines, on rank 0; None elsewhere. Collective over the trainer; every rank is connected to Ray.

    engines    wanted in a fleet; colocated ones are as many as the ranks' GPUs hold
    workers    GPUs of one engine
    joined     whether this is a Ray cluster that was there before the run
    timeout_s  for Ray to set GPUs aside
    """
    node = ray.get_runtime_context().get_node_id()
    on_gpu = device.type == "cuda"
    seen = tuple(gpu_uuid(torch.device("cuda", i)) for i in range(torch.cuda.device_count())) if on_gpu else ()
    ranks: list[RankPlace] = [RankPlace("", None, ())] * dist.get_world_size()
    dist.all_gather_object(ranks, RankPlace(node, gpu_uuid(device) if on_gpu else None, seen))
    if on_gpu and placement == "colocated":
        check_allocator()
    if dist.get_rank() != 0:
        return None
    if placement == "colocated":
        return Places(colocated(ranks, workers), timeout_s=timeout_s)
    others = {} if not joined else {n["NodeID"]: int(n["Resources"].get("GPU", 0)) for n in ray.nodes() if n["Alive"]}
    return Places(fleet(ranks, engines=engines, workers=workers, nodes=others), timeout_s=timeout_s)


def colocated(ranks: Sequence[RankPlace], workers: int) -> list[EnginePlace]:
    """Engine e on the GPUs of ranks [e * workers, (e + 1) * workers)."""
    if len(ranks) % workers:
        raise UserError(
            f"rollout.placement=colocated: {len(ranks)} ranks are not a multiple of "
            f"rollout.tensor_parallel={workers}; change one of them"
        )
    places = []
    for first in range(0, len(ranks), workers):
        mine = ranks[first : first + workers]
        if len({rank.node for rank in mine}) > 1:
            raise UserError(
                f"rollout.tensor_parallel={workers}: ranks {first} to {first + workers - 1} are on several nodes, but "
                "a colocated engine has to fit on one; choose a divisor of the ranks per node"
            )
        places.append(EnginePlace(node=mine[0].node, uuids=tuple(rank.uuid for rank in mine if rank.uuid is not None)))
    return places


def fleet(ranks: Sequence[RankPlace], *, engines: int, workers: int, nodes: dict[str, int]) -> list[EnginePlace]:
    """Engines on GPUs that no rank trains on: first those left free on the trainer's nodes, then those of `nodes`
    (GPUs by Ray's node id), which Ray hands out."""
    if ranks[0].uuid is None:
        return [EnginePlace()] * engines
    used = {rank.uuid for rank in ranks}
    places: list[EnginePlace] = []
    for node in dict.fromkeys(rank.node for rank in ranks):
        seen = dict.fromkeys(uuid for rank in ranks if rank.node == node for uuid in rank.uuids)
        free = [uuid for uuid in seen if uuid not in used]
        places += [
            EnginePlace(node=node, uuids=tuple(free[i : i + workers]))
            for i in range(0, len(free) - workers + 1, workers)
        ]
    places = places[:engines]
    training = {rank.node for rank in ranks}
    handed_out = [count // workers for node, count in nodes.items() if node not in training]
    missing = engines - len(places)
    if missing > sum(handed_out):
        raise UserError(
            f"rollout.placement=fleet: {engines} engines of {workers} GPUs are wanted; beside the trainer's "
            f"{len(ranks)} GPUs there is room for {len(places) + sum(handed_out)}. Start fewer ranks (NPROC), set "
            "rollout.engines, add nodes to the Ray cluster (RAY_ADDRESS), or use rollout.placement=colocated"
        )
    offered = [node for node in training if nodes.get(node)]
    if missing and offered:
        raise UserError(
            f"rollout.placement=fleet: the Ray cluster offers the GPUs of {len(offered)} nodes that the trainer uses "
            "itself, and may put an engine there; start Ray on the trainer's nodes with --num-gpus 0"
        )
    return places + [EnginePlace(gpus=workers)] * missing
