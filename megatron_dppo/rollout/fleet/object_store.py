"""Weights through Ray's object store: gathered on the controller, put there once for all engines."""

from __future__ import annotations

from functools import partial

import ray
import torch

from megatron_dppo.checkpoint.weight_buckets import WeightBuckets
from megatron_dppo.checkpoint.weight_layout import Bucket
from megatron_dppo.rollout.engine import RolloutEngine
from megatron_dppo.rollout.weight_transfer.recipients import Pending, Recipients, WeightSender


class ObjectStoreSender(WeightSender):
    """For CPUs, and wherever nothing faster connects trainer and engine. Memory: one bucket on every rank, two in the
    object store (one being loaded while the next is gathered)."""

    def __init__(self, buckets: WeightBuckets, device: torch.device) -> None:
        self._buckets, self._device = buckets, device

    def send(self, version: int, to: Recipients | None) -> dict[int, int]:
        """See `WeightSender.send`. No checksums: a bucket in the store is whole or it is not there."""
        payload = torch.empty(self._buckets.largest, dtype=torch.uint8, device=self._device)
        loading: Pending[None] | None = None
        for index, layout in enumerate(self._buckets.layouts):
            self._buckets.gather(index, payload)
            if to is None:
                continue
            try:
                reference = ray.put(Bucket(layout.slots, payload[: layout.size].cpu().numpy()))
            except ray.exceptions.RayError as error:  # a full store; the other ranks gather what is left all the same
                to.fail_all(error)
                continue
            to.wait(loading)
            loading = to.ask(partial(_load, version=version, reference=reference))
        if to is not None:
            to.wait(loading)
        return {}


def _load(engine: RolloutEngine, *, version: int, reference: ray.ObjectRef) -> None:
    """Where the engine lives: all engines of a node read the bucket from one place."""
    engine.receive_bucket(version, ray.get(reference))
