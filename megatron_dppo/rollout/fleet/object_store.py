"""Weights through Ray's object store: gathered on the controller, put there once for all engines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import ray
import torch

from megatron_dppo.checkpoint.weight_buckets import WeightBuckets
from megatron_dppo.checkpoint.weight_layout import Bucket, BucketLayout, unpack
from megatron_dppo.rollout.engine import RolloutEngine
from megatron_dppo.rollout.weight_transfer.recipients import Pending, Recipients, WeightSender

Change = Callable[[str, torch.Tensor], torch.Tensor]
"""What an engine is to have instead of a tensor: of its name, same shape and type."""


class ObjectStoreSender(WeightSender):
    """For CPUs, and wherever nothing faster connects trainer and engine. Memory: one bucket on every rank, two in the
    object store (one being loaded while the next is gathered)."""

    def __init__(self, buckets: WeightBuckets, device: torch.device, change: Change | None = None) -> None:
        self._buckets, self._device, self._change = buckets, device, change

    def send(self, version: int, to: Recipients | None) -> dict[int, int]:
        """See `WeightSender.send`. No checksums: a bucket in the store is whole or it is not there."""
        payload = torch.empty(self._buckets.largest, dtype=torch.uint8, device=self._device)
        loading: Pending[None] | None = None
        for index, layout in enumerate(self._buckets.layouts):
            self._buckets.gather(index, payload)
            if to is None:
                continue
            if self._change is not None:
                _apply(self._change, layout, payload)
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


def _apply(change: Change, layout: BucketLayout, payload: torch.Tensor) -> None:
    for slot, tensor in unpack(layout.slots, payload):
        if slot.blocks:
            raise NotImplementedError(f"{slot.name} lies in blocks, and a changed copy has no place")
        for name, single in zip(slot.names(), tensor if slot.experts else [tensor], strict=True):
            single.copy_(change(name, single))
