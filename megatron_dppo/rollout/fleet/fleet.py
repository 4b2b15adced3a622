"""The controller's engines, one or several, used as one; those that fail are replaced while the others go on."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megatron_dppo.batch import RolloutBatch
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.engine import GenerationRequest, SamplingLaw
from megatron_dppo.rollout.fleet.dispatcher import Dispatch
from megatron_dppo.rollout.fleet.remote_engine import RayRolloutEngine
from megatron_dppo.rollout.fleet.replica import Seat
from megatron_dppo.rollout.fleet.store import RolloutStore
from megatron_dppo.rollout.fleet.work import Ticket, in_pieces
from megatron_dppo.rollout.stored import LayerGroups, RolloutHandle, column_names, columns_of


class EngineFleet:
    """Engines in Ray actors behind one `RolloutEngine`. They load in the background once this is made.

    Work goes to the engine with the fewest tokens in flight, by groups of the samples of one prompt; what is beyond the
    budgets (`rollout.max_tokens_in_flight`) waits here. An engine that dies, hangs or answers nonsense loses its work
    to the others, and another one takes its seat, which gets work when it has the current weights
    (`members_behind`, `synced`). Calls may come from several threads. Needs a connected `RaySession`.

    Errors of a call: `UserError` for what was asked wrongly, `GenerationTimeout` for a request that took too long
    twice, `EnginesFailed` once engines failed more than `rollout.max_engine_failures` times.
    """

    def __init__(
        self,
        model: Path,
        config: RolloutConfig,
        *,
        name: str = "rollout",
        options: Sequence[Mapping[str, Any]] | None = None,
        logs: Path | None = None,
    ) -> None:
        """
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
        seats = [Seat(model, config, f"{name}-engine-{number}", place, logs) for number, place in enumerate(places)]
        self._dispatch = Dispatch(seats, config, self._store, self._store_name)

    # What the trainer samples

    def generate(self, requests: Sequence[GenerationRequest], law: SamplingLaw, *, training: bool) -> RolloutBatch:
        """See `RolloutEngine.generate`; the whole batch comes to this process, for rewards and metrics."""
        ticket = Ticket(in_pieces(requests, self._config.sequences_per_object), law, training=training)
        return RolloutBatch.concatenate(self._dispatch.wait_for(ticket))

    def generate_refs(
        self,
        requests: Sequence[GenerationRequest],
        law: SamplingLaw,
        layer_groups: LayerGroups | None = None,
        *,
        samples: int | None = None,
        enough: int | None = None,
    ) -> RolloutHandle:
        """Sample every request for training and leave the sequences in the object store, for `RolloutSource` on any
        rank. Release the handle when the step is over, or the store fills up.

        layer_groups  MoE layers whose routes are pulled together, one group per model chunk of the trainer's pipeline
                      (`MegatronActor.moe_layer_groups`); None is one group of all
        samples       requests of one prompt, where the same prompt may come again right after them
        enough        prompts after whose completion the others are dropped; None samples all
        """
        pieces = in_pieces(requests, self._config.sequences_per_object if enough is None else 1, samples=samples)
        ticket = Ticket(pieces, law, training=True, stored=True, layer_groups=layer_groups, enough=enough)
        results = self._dispatch.wait_for(ticket)
        ray.get([known for _, known in results])
        return RolloutHandle.concatenate([handle for handle, _ in results])

    def keep(self, batch: RolloutBatch, layer_groups: LayerGroups | None = None) -> RolloutHandle:
        """Leave sequences that were put together from several calls of `generate` in the object store; see
        `generate_refs`."""
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
        """Let the store forget a rollout as soon as nobody holds arrays of it."""
        ray.get(self._store.release.remote(list(handle.keys)))

    def take_counts(self) -> dict[str, float]:
        """What happened since this was asked last: `rollout/...` metrics of faults and of dropped work."""
        return self._dispatch.ask(self._dispatch.take_counts)

    # Weights

    @property
    def members(self) -> list[RayRolloutEngine]:
        """The engines that have loaded."""
        return self._dispatch.ask(self._dispatch.members)

    def members_to_sync(self, version: int) -> list[RayRolloutEngine]:
        """The engines that are to get the weights of `version`, of which there is at least one. Engines that load for
        the first time are waited for, others get the weights later. Until `synced` no engine is given work; what they
        have is finished first, unless `rollout.partial_rollouts` lets the sync cut it."""
        return self._dispatch.hold_for(version, drain=not self._config.partial_rollouts)

    def members_behind(self) -> list[RayRolloutEngine]:
        """Engines that wait for the weights of the last sync: those that took a seat since."""
        return self._dispatch.ask(self._dispatch.behind)

    def synced(self, version: int, members: Sequence[RayRolloutEngine], failed: Mapping[str, Exception]) -> None:
        """A sync of `members` has ended. Those named in `failed` did not get the weights; they are replaced."""
        self._dispatch.ask(lambda: self._dispatch.synced(version, members, failed))

    # The engines themselves

    def wait_until_ready(self) -> None:
        """Block until all engines can generate; raises what a start-up raised."""
        self._dispatch.wait_until_up()

    def ready_members(self) -> list[RayRolloutEngine]:
        """All engines, once they can generate; raises as `wait_until_ready`."""
        self.wait_until_ready()
        return self.members

    def sleep(self) -> None:
        for one in self.members:
            one.sleep()

    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        for one in self.members:
            one.wake(what)

    def pause(self) -> None:
        for one in self.members:
            one.pause()

    def resume(self) -> None:
        for one in self.members:
            one.resume()

    def close(self) -> None:
        """End all engines. Idempotent; whoever still waits for work gets `EngineClosed`."""
        engines = self._dispatch.close()
        threads = [threading.Thread(target=engine.close) for engine in engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if engines and ray.is_initialized():
            ray.kill(self._store)
