"""Lends the training side's device memory to the rollout engine between phases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megatron_dppo.checkpoint.optimizer_state import distributed_parts

Part = Literal["weights", "optimizer", "gradients"]
PARTS: tuple[Part, ...] = ("weights", "optimizer", "gradients")
_PIECE, _ALIGNMENT = 1 << 28, 256
"""Bytes of one host buffer (torch rounds page-locked ones up to powers of two: one large buffer could waste as much as
it holds), and what the parts cut out of it start at a multiple of."""


@dataclass
class _Storage:
    """One device storage that may be away. All tensors over it, views too, stay valid objects and come back with it."""

    storage: torch.UntypedStorage
    size: int
    host: list[torch.Tensor] | None
    """Where the content is; None for gradient buffers, which come back as zeros, as the next step would make them."""

    def send(self) -> None:
        for source, target in zip(self._pieces(), self.host or (), strict=self.host is not None):
            target.copy_(source, non_blocking=True)

    def fetch(self) -> None:
        self.storage.resize_(self.size)
        for index, target in enumerate(self._pieces()):
            if self.host is None:
                target.zero_()
            else:
                target.copy_(self.host[index], non_blocking=True)

    def _pieces(self) -> tuple[torch.Tensor, ...]:
        whole = torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)
        return whole.split(_PIECE)


class Offloader:
    """Moves weights, optimizer state and gradient buffers of one rank to host memory and back, bit for bit.

    Whole storages are moved and resized to nothing, so that every view of them (parameters in Megatron-Core's
    buffers, `main_grad`, shards of master weights) is valid again afterwards, and nothing holds a stale pointer.
    Host buffers are page-locked and kept for the next time: host memory of weights (2 bytes a parameter in bfloat16)
    and of this rank's optimizer state (12 bytes a parameter over the data-parallel size). No collectives.
    """

    def __init__(self, chunks: Sequence[Any], optimizer: Any, device: torch.device) -> None:
        self._chunks, self._optimizer, self._device = chunks, optimizer, device
        self._spare: dict[int, list[list[torch.Tensor]]] = {}
        """Host buffers of earlier times, by the bytes they hold."""
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._away: dict[Part, list[_Storage]] = {}

    @property
    def away(self) -> frozenset[Part]:
        """The parts that are in host memory now."""
        return frozenset(self._away)

    def offload(self, parts: Iterable[Part] = PARTS) -> int:
        """Free the device memory of `parts`; what is away already stays away. Returns the bytes freed on this rank."""
        leaving = {part: list(self._storages(part)) for part in PARTS if part in set(parts) - self.away}
        moving = [storage for storages in leaving.values() for storage in storages]
        _wait(self._device)  # a kernel may still write to them
        for storage in moving:
            storage.send()
        _wait(self._device)
        for storage in moving:
            storage.storage.resize_(0)
        self._away |= leaving
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return sum(storage.size for storage in moving)

    def onload(self, parts: Iterable[Part] = PARTS) -> None:
        """Bring `parts` back; gradient buffers come back as zeros."""
        coming = [part for part in PARTS if part in set(parts) & self.away]
        returning = [storage for part in coming for storage in self._away[part]]
        for storage in returning:  # the content stays here until all is there: the device may have no room yet
            storage.fetch()
        _wait(self._device)  # before a host buffer serves for something else
        for part in coming:
            del self._away[part]
        for storage in returning:
            if storage.host is not None:
                self._spare.setdefault(storage.size, []).append(storage.host)

    def _storages(self, part: Part) -> Iterator[_Storage]:
        """The device storages of a part, each once; what another part owns is left to it."""
        weights = {t.untyped_storage().data_ptr() for t in self._tensors("weights")} if part == "optimizer" else set()
        seen: set[int] = set()
        for tensor in self._tensors(part):
            storage = tensor.untyped_storage()
            where = storage.data_ptr()
            # float32 weights are their own masters; optimizer state that lives on the host costs no device memory.
            if tensor.device.type != self._device.type or where == 0 or where in seen | weights:
                continue
            seen.add(where)
            size = storage.nbytes()
            yield _Storage(storage, size, None if part == "gradients" else self._host_buffer(size))

    def _host_buffer(self, size: int) -> list[torch.Tensor]:
        if self._spare.get(size):
            return self._spare[size].pop()
        return [self._carve(min(_PIECE, size - start)) for start in range(0, size, _PIECE)]

    def _carve(self, size: int) -> torch.Tensor:
        """Part of a large page-locked buffer: locking pages tensor by tensor would take longer than copying them."""
        if len(self._slab) < size:
            pinned = self._device.type == "cuda"
            self._slab = torch.empty(max(size, _PIECE if pinned else size), dtype=torch.uint8, pin_memory=pinned)
        part, self._slab = self._slab[:size], self._slab[-(-size // _ALIGNMENT) * _ALIGNMENT :]
        return part

    def _tensors(self, part: Part) -> Iterator[torch.Tensor]:
        if part == "optimizer":
            yield from _optimizer_tensors(self._optimizer)
            return
        for chunk in self._chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                if part == "gradients":
                    yield buffer.grad_data
                elif buffer.param_data is not None:
                    yield buffer.param_data
            if part == "weights":  # frozen parameters and buffers are in no gradient buffer
                yield from (p.data for p in chunk.module.parameters())


def _optimizer_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """Master weights and moments of dense and expert parameters."""
    for part in distributed_parts(optimizer):
        inner = part.optimizer
        for group in inner.param_groups:
            for parameter in group["params"]:
                yield parameter.data
                yield from (v for v in inner.state.get(parameter, {}).values() if torch.is_tensor(v))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
