"""The controller's engines, one or several, used as one; those that fail are replaced while the others go on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megatron_dppo.batch import RolloutBatch
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.engine import EngineClient, FleetStatus, GenerationRequest, RolloutEngine, SamplingConfig
from megatron_dppo.rollout.fleet.dispatcher import Dispatcher
from megatron_dppo.rollout.fleet.host import RemoteEngine
from megatron_dppo.rollout.fleet.replica import Replica
from megatron_dppo.rollout.fleet.store import RolloutStore
from megatron_dppo.rollout.fleet.work import Ticket, in_pieces
from megatron_dppo.rollout.stored import LayerGroups, RolloutHandle, column_names, columns_of


class EngineFleet:
    """The `RolloutFleet` of engines in Ray actors. They load in the background once this is made.

    Work goes to the engine with the fewest tokens in flight (`best_for`), by groups of the samples of one prompt; what
    is beyond the budgets (`rollout.max_tokens_in_flight`) waits here. An engine that dies, hangs or answers nonsense
    loses its work to the others, and another one takes its place, which gets work when it has the current weights
    (`members_behind`, `synced`). Needs a connected `RaySession`.
    """

    def __init__(
        self,
        make: Callable[[], RolloutEngine],
        config: RolloutConfig,
        *,
        name: str = "rollout",
        options: Sequence[Mapping[str, Any]] | None = None,
        logs: Path | None = None,
    ) -> None:
        """
        make     makes an engine of `config`, where it is to live; it is pickled
        name     prefix of the names of the Ray actors, unique in the session
        options  further options of each engine's Ray actor (GPUs, placement group, environment); one entry per engine.
                 None is `rollout.engines` of them without any
        logs     folder of a file per engine with what it prints; None leaves that to Ray
        """
        self._config = config
        self._store_name = f"{name}-store"
        # Beside the controller: on a node of engines it would go down with them, and every rollout with it.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        store: Any = ray.remote(RolloutStore).options(name=self._store_name, num_cpus=0, scheduling_strategy=here)
        self._store: Any = store.remote()
        places = [{}] * config.engines if options is None else list(options)
        replicas = [
            Replica(make, config, f"{name}-engine-{number}", place, logs) for number, place in enumerate(places)
        ]
        self._dispatcher = Dispatcher(replicas, config, self._store, self._store_name)

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingConfig, *, training: bool
    ) -> RolloutBatch:
        ticket = Ticket(in_pieces(requests, self._config.sequences_per_object), sampling, training=training)
        return RolloutBatch.concatenate(self._dispatcher.wait_for(ticket))

    def generate_stored(
        self,
        requests: Sequence[GenerationRequest],
        sampling: SamplingConfig,
        layer_groups: LayerGroups | None = None,
        *,
        samples: int | None = None,
        enough: int | None = None,
        arrived: Callable[[RolloutHandle], None] = lambda part: None,
    ) -> RolloutHandle:
        pieces = in_pieces(requests, self._config.sequences_per_object if enough is None else 1, samples=samples)
        ticket = Ticket(pieces, sampling, training=True, stored=True, layer_groups=layer_groups, enough=enough)

        def pulled(result: tuple[RolloutHandle, ray.ObjectRef]) -> None:
            part, known = result
            ray.get(known)
            arrived(part)

        results = self._dispatcher.wait_for(ticket, pulled)
        return RolloutHandle.concatenate([handle for handle, _ in results])

    def keep(self, batch: RolloutBatch, layer_groups: LayerGroups | None = None) -> RolloutHandle:
        size = self._config.sequences_per_object
        handles, known = [], []
        for start in range(0, len(batch), size):
            chosen = list(range(start, min(start + size, len(batch))))
            key = f"{batch.request_ids[start]}+{len(chosen)}"
            handle, columns = columns_of(
                batch.select(chosen), store=self._store_name, key=key, layer_groups=layer_groups
            )
            names = column_names(layer_groups)
            references = {n: ray.put(c) for n, c in zip(names, columns, strict=True) if c is not None}
            known.append(self._store.put.remote(key, references))
            handles.append(handle)
        ray.get(known)
        return RolloutHandle.concatenate(handles)

    def release(self, handle: RolloutHandle) -> None:
        ray.get(self._store.release.remote(list(handle.keys)))

    def begin_run(self) -> None:
        self._dispatcher.ask(self._dispatcher.begin_run)

    def take_counts(self) -> dict[str, float]:
        return self._dispatcher.ask(self._dispatcher.take_counts)

    def status(self) -> FleetStatus:
        return self._dispatcher.ask(self._dispatcher.status)

    @property
    def members(self) -> list[RemoteEngine]:
        """The engines that have loaded."""
        return self._dispatcher.ask(self._dispatcher.members)

    def ready_members(self) -> Sequence[RemoteEngine]:
        return self._dispatcher.wait_until_up()

    def members_to_sync(self, version: int) -> Sequence[RemoteEngine]:
        return self._dispatcher.hold_for(version, drain=not self._config.partial_rollouts)

    def members_behind(self) -> Sequence[RemoteEngine]:
        return self._dispatcher.ask(self._dispatcher.behind)

    def synced(self, version: int, members: Sequence[EngineClient], failed: Mapping[str, Exception]) -> None:
        self._dispatcher.ask(lambda: self._dispatcher.synced(version, members, failed))

    def close(self) -> None:
        engines = self._dispatcher.close()
        threads = [threading.Thread(target=engine.close) for engine in engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if engines and ray.is_initialized():
            ray.kill(self._store)
