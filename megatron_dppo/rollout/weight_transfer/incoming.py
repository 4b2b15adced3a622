"""The receiving end of a sync: buckets out of buffers that a trainer rank shares, or from a communicator."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from megatron_dppo.checkpoint.weight_layout import BucketLayout, TensorSlot
from megatron_dppo.rollout.engine import TransferTerms
from megatron_dppo.rollout.weight_transfer.cuda_ipc import open_shared
from megatron_dppo.rollout.weight_transfer.group import WeightGroup
from megatron_dppo.rollout.weight_transfer.manifest import checksum, sampled, values_of
from megatron_dppo.rollout.weight_transfer.turns import Emptying

Load = Callable[[Sequence[TensorSlot], torch.Tensor], None]
"""Takes the tensors of a bucket's slots out of its payload, which is written again when this returns; on a GPU
asynchronously, in the current stream's order."""


class Incoming:
    """One worker of an engine. Memory: two buckets as long as it is in a communicator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._layouts: dict[int, BucketLayout] = {}
        """Of the buckets that this worker needs, by number."""
        self._group: WeightGroup | None = None
        self._room: list[torch.Tensor] = []
        """For buckets of the communicator. Held between syncs: they would have to find it again beside an engine."""
        self._source_rank: dict[int, int] = {}
        self._buffers: list[torch.Tensor] = []
        self._turns: Emptying | None = None
        self._sums: dict[int, torch.Tensor] = {}

    def agree(self, terms: TransferTerms, worker: int = 0) -> None:
        """What is absent from the terms stays as it was. `worker`: number of this one in its engine."""
        if terms.layouts is not None:
            self._layouts = {index: one for index, one in enumerate(terms.layouts) if one.goes_to(worker)}
        if terms.group is not None:
            self.leave()
            let_go(self._device)  # communicators need memory that torch's allocator does not have
            self._source_rank = dict(terms.source_rank)
            self._group = WeightGroup(terms.group, terms.first_rank + worker, self._device)
        if terms.buffers:
            self.close_buffers()  # of a sync that died
            self._buffers, self._turns = open_shared(dict(terms.buffers), self._device)

    def begin(self) -> None:
        """Another sync begins."""
        self._sums = {}

    def take(self, way: Literal["shared", "group"], load: Load) -> None:
        """Load every bucket that this worker needs, out of the shared buffers or from the communicator: one is on its
        way while the one before it is loaded."""
        if way == "shared":
            self._take_turns(load)
        else:
            self._take_part(load)

    def _take_turns(self, load: Load) -> None:
        turns = self._turns
        if turns is None:
            raise RuntimeError("no buffers are shared with this worker; `agree` names some")
        try:
            for turn, index in enumerate(self._layouts):
                turns.begin(turn)
                self._load(index, self._buffers[turn % len(self._buffers)], load)
                if self._device.type == "cuda":
                    torch.cuda.current_stream(self._device).synchronize()
                turns.end(turn)
        finally:
            self.close_buffers()  # the rank that fills them may free them, and after an error need not wait

    def _take_part(self, load: Load) -> None:
        group = self._group
        if group is None:
            raise RuntimeError("this worker is in no communicator; `agree` names one")
        size = max(layout.size for layout in self._layouts.values())
        if not self._room or len(self._room[0]) < size:
            self._room = []
            self._room = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(2)]
        buffers = self._room
        numbers = list(self._layouts)

        def start(turn: int) -> list[Any]:
            # Ordered after what the current stream has to do: loading the bucket that this memory held before.
            payload, layout = buffers[turn % 2], self._layouts[numbers[turn]]
            return [
                group.broadcast(payload[part.start : part.stop], self._source_rank[part.source], layout.share)
                for part in layout.segments
            ]

        try:
            coming = start(0)
            for turn, index in enumerate(numbers):
                group.wait(coming)
                coming = start(turn + 1) if turn + 1 < len(numbers) else []
                self._load(index, buffers[turn % 2], load)
            group.finish()
        except BaseException:
            group.give_up()  # an engine answers when all of its workers have: the others would wait for this one
            raise

    def checksums(self) -> dict[int, int]:
        """Of the buckets since `begin`, by number, see `checksum`. Waits for the device."""
        return values_of(self._sums)

    def leave(self) -> None:
        """Leave the communicator."""
        self._room = []
        if self._group is not None:
            self._group.abort()  # not shutdown: a peer may be gone
            self._group = None

    def close(self) -> None:
        self.leave()
        self.close_buffers()

    def close_buffers(self) -> None:
        """Let go of what the trainer's rank shared, which then no longer waits for this worker."""
        self._buffers = []
        if self._turns is not None:
            self._turns.close()
            self._turns = None

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
