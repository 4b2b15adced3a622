"""The controller's engines: one or several, used as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from megatron_dppo.batch import RolloutBatch
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.protocol import GenerationRequest, SamplingLaw
from megatron_dppo.rollout.ray_engine import RayRolloutEngine
from megatron_dppo.rollout.stored import LayerGroups, RolloutHandle


class EngineFleet:
    """Engines in Ray actors behind one `RolloutEngine`. They load in the background once this is made."""

    def __init__(
        self, model: Path, config: RolloutConfig, *, options: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """
        options  further options of each engine's Ray actor; as many as there are engines
        """
        placed = options if options is not None else [{}]
        self.members = [
            RayRolloutEngine(model, config, name=f"rollout-engine-{number}", options=one)
            for number, one in enumerate(placed)
        ]

    def members_to_sync(self, version: int) -> list[RayRolloutEngine]:
        """The engines that do not hold the weights of `version` yet and can receive them."""
        return list(self.members)

    def synced(self, version: int, failed: Mapping[str, Exception]) -> None:
        """Tell the fleet that a sync of `members_to_sync` has ended: those not in `failed` hold `version`."""
        for error in failed.values():
            raise error

    def generate(self, requests: Sequence[GenerationRequest], law: SamplingLaw, *, training: bool) -> RolloutBatch:
        return self.members[0].generate(requests, law, training=training)

    def generate_refs(
        self, requests: Sequence[GenerationRequest], law: SamplingLaw, layer_groups: LayerGroups | None = None
    ) -> RolloutHandle:
        return self.members[0].generate_refs(requests, law, layer_groups)

    def keep(self, batch: RolloutBatch, layer_groups: LayerGroups | None = None) -> RolloutHandle:
        return self.members[0].keep(batch, layer_groups)

    def release(self, handle: RolloutHandle) -> None:
        self.members[0].release(handle)

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
        for one in self.members:
            one.close()
