"""The receiving end of a sync: buckets out of buffers that a trainer rank shares, or from a communicator."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_dppo.checkpoint.weight_layout import BucketLayout, TensorSlot
from megatron_dppo.rollout.engine import TransferTerms
from megatron_dppo.rollout.weight_transfer.cuda_ipc import open_shared
from megatron_dppo.rollout.weight_transfer.group import WeightGroup
from megatron_dppo.rollout.weight_transfer.manifest import checksum, sampled

Load = Callable[[Sequence[TensorSlot], torch.Tensor], None]
"""Takes the tensors of a bucket's slots out of its payload, which is written again when this returns; on a GPU
asynchronously, in the current stream's order."""


class Incoming:
    """One worker of an engine. Memory: two buckets while they come from a communicator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._layouts: Sequence[BucketLayout] = []
        self._group: WeightGroup | None = None
        self._source_rank: dict[int, int] = {}
        self._buffers: list[torch.Tensor] = []
        self._sums: dict[int, torch.Tensor] = {}

    def agree(self, terms: TransferTerms, worker: int = 0) -> None:
        """What is absent from the terms stays as it was. `worker`: number of this one in its engine."""
        if terms.layouts is not None:
            self._layouts = terms.layouts
        if terms.group is not None or terms.close:
            self.leave()
        if terms.group is not None:
            self._source_rank = dict(terms.source_rank)
            self._group = WeightGroup(terms.group, terms.first_rank + worker, self._device)
        if terms.buffers or terms.close:
            self._buffers = []
            let_go(self._device)
        if terms.buffers:
            self._buffers = open_shared(dict(terms.buffers), self._device)

    def begin(self) -> None:
        """Another sync begins."""
        self._sums = {}

    def take(self, number: int | None, load: Load) -> None:
        """Load the bucket of that number out of the shared buffers, or (None) every one from the communicator: one is
        on its way while the one before it is loaded."""
        if number is not None:
            self._load(number, self._buffers[number % len(self._buffers)], load)
            return
        group = self._group
        if group is None:
            raise RuntimeError("this worker is in no communicator; `agree` names one")
        size = max(layout.size for layout in self._layouts)
        buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(2)]

        def start(index: int) -> list[Any]:
            # Ordered after what the current stream has to do: loading the bucket that this memory held before.
            payload = buffers[index % 2]
            return [
                group.broadcast(payload[part.start : part.stop], self._source_rank[part.source])
                for part in self._layouts[index].segments
            ]

        coming = start(0)
        for index in range(len(self._layouts)):
            group.wait(coming)
            coming = start(index + 1) if index + 1 < len(self._layouts) else []
            self._load(index, buffers[index % 2], load)
        group.finish()

    def checksums(self) -> dict[int, int]:
        """Of the buckets since `begin`, by number, see `checksum`. Waits for the device."""
        return {index: int(value) for index, value in self._sums.items()}

    def leave(self) -> None:
        """Leave the communicator."""
        if self._group is not None:
            self._group.abort()  # not shutdown: a peer may be gone
            self._group = None

    def close(self) -> None:
        self.leave()
        self._buffers = []

    def _load(self, index: int, payload: torch.Tensor, load: Load) -> None:
        layout = self._layouts[index]
        load(layout.slots, payload)
        self._sums[index] = checksum(payload, sampled(index, layout))


def let_go(device: torch.device) -> None:
    """Give memory that a sync needed back to the GPU: the KV cache, or the trainer, will have it."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.ipc_collect()
