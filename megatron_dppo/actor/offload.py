"""Lends the training side's device memory to the rollout engine between phases."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch

from megatron_dppo.checkpoint.state_parts import distributed_parts

Part = Literal["weights", "optimizer", "gradients"]
PARTS: tuple[Part, ...] = ("weights", "optimizer", "gradients")
_FIRST: tuple[Part, ...] = ("weights", "gradients", "optimizer")
"""What a step needs first comes back first."""
_FREE: tuple[Part, ...] = ("gradients", "optimizer", "weights")
"""What is free first leaves first."""
_LOCKING = 4
"""Threads that page-lock memory beside the first rollout."""
_BLOCK, _ROUNDED = 1 << 30, 512
"""Bytes of device memory that storages share, at least, and what torch's allocator rounds each of them up to."""
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

    def allocate(self) -> None:
        self.storage.resize_(self.size)

    def fetch(self) -> None:
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

    On a GPU copies run in a stream of their own, beside what else the device does:

    ```
    host      make_room ─ there is enough ─ leave ─ engines load ─ they end ─ offload    onload ─ gradients ─ arrive
    copies    some optimizer state ──┘  the rest, and weights behind it ─────────┘     weights ─┘ optimizer state ─┘
    ```
    """

    def __init__(self, chunks: Sequence[Any], optimizer: Any, device: torch.device, *, keep: int = 0) -> None:
        """
        keep  bytes of optimizer state that stay where they are
        """
        self._chunks, self._optimizer, self._device, self._keep = chunks, optimizer, device, keep
        self._spare: dict[int, list[list[torch.Tensor]]] = {}
        """Host buffers of earlier times, by the bytes they hold."""
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._slabs: list[torch.Tensor] = []
        """Page-locked, and not used yet; those that are being locked."""
        self._locking: list[Future[torch.Tensor]] = []
        self._away: dict[Part, list[_Storage]] = {}
        self._leaving: list[_Storage] = []
        """On their way to the host; they still have their memory here."""
        self._coming: Future[torch.cuda.Event] | None = None
        """When optimizer state is back."""
        self._thread = ThreadPoolExecutor(1)
        self._under_way: list[Future[torch.cuda.Event]] = []
        """What the thread was given since the last `wait` that ended well."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def away(self) -> frozenset[Part]:
        """The parts that are in host memory now, or on their way there."""
        return frozenset(self._away)

    def offload(self, parts: Iterable[Part] = PARTS) -> int:
        """Free the device memory of `parts`; what is away already stays away. Returns the bytes freed on this rank."""
        size = self.leave(parts)
        self._free()
        return size

    def leave(self, parts: Iterable[Part]) -> int:
        """`offload` that does not wait: `parts` are copied behind what is under way, and have their memory until the
        next call of this object that frees any."""
        leaving = self._named(parts)
        self._send(leaving)
        return sum(storage.size for storage in leaving)

    def wait(self) -> None:
        """Until what is on its way has arrived. Raises what a copy failed with, and does so again at every later call:
        nothing may be freed after that, or taken for what left."""
        for error in [copies.exception() for copies in self._under_way]:
            if error is not None:
                raise error
        if self._stream is not None:
            self._stream.synchronize()
        self._under_way = []

    def make_room(self, parts: Iterable[Part], missing: Callable[[], int]) -> int:
        """`offload` that returns as soon as `missing`, the bytes that somebody else needs here, is 0 or less: the rest
        is then under way, and has its memory until the next call of this object. Returns the bytes that are copied.

        As little as is missing is copied before it is looked again, since a driver that takes memory back waits for all
        copies.
        """
        self._free()
        leaving = self._named(parts)
        first = 0
        while first < len(leaving) and (needed := missing()) > 0:
            last = first
            while last < len(leaving) and needed > 0:
                needed -= leaving[last].size
                last += 1
            self._send(leaving[first:last])
            self._free()
            first = last
        self._send(leaving[first:])
        return sum(storage.size for storage in leaving if storage.host is not None)

    def onload(self, parts: Iterable[Part] = PARTS) -> None:
        """Bring `parts` back; gradient buffers come back as zeros. On a GPU they may be under way when this returns:
        what the device is given afterwards waits for weights and gradients, and for optimizer state after `arrive`."""
        self._free()
        coming = [part for part in _FIRST if part in set(parts) & self.away]
        try:
            for part in coming:
                self._allocate(self._away[part])
                self._coming = self._copy(_Storage.fetch, self._away[part])
                if part != "optimizer":
                    self.arrive()
        except BaseException:
            self.wait()
            raise
        for part in coming:  # the content stayed there until all had room: the device might not have had it
            for storage in self._away.pop(part):
                if storage.host is not None:
                    self._spare.setdefault(storage.size, []).append(storage.host)

    def arrive(self) -> None:
        """What the device is given next waits until optimizer state is back."""
        if self._coming is not None:
            torch.cuda.current_stream(self._device).wait_event(self._coming.result())
            self._coming = None

    def prepare(self) -> None:
        """Page-lock the host memory that the moments will need which Adam makes at its first step: in a thread, since
        it takes seconds."""
        if self._stream is None or self._locking:
            return
        missing = -self._keep - sum(len(slab) for slab in self._slabs)
        for part in distributed_parts(self._optimizer):
            inner = part.optimizer
            for group in inner.param_groups:
                missing += sum(8 * p.numel() for p in group["params"] if p.is_cuda and not inner.state.get(p))
        if missing > 0:
            threads = ThreadPoolExecutor(_LOCKING)
            count = -(-missing // _PIECE) + 1
            self._locking = [threads.submit(_page_locked, self._device) for _ in range(count)]
            threads.shutdown(wait=False)

    def _named(self, parts: Iterable[Part]) -> list[_Storage]:
        """The storages of parts that are not away yet, which they are from here on, in the order in which they leave:
        gradients are not copied, so their memory is free at once."""
        self._slabs += [slab.result() for slab in self._locking]
        self._locking = []
        leaving = {part: list(self._storages(part)) for part in PARTS if part in set(parts) - self.away}
        self._away |= leaving
        return [storage for part in sorted(leaving, key=_FREE.index) for storage in leaving[part]]

    def _send(self, storages: Sequence[_Storage]) -> None:
        self._copy(_Storage.send, storages)
        self._leaving += storages

    def _free(self) -> None:
        """Let go of the memory of what was sent, and give it to the driver, for other processes."""
        if not self._leaving:
            return
        self.wait()
        for storage in self._leaving:
            storage.storage.resize_(0)
        self._leaving = []
        if self._stream is not None:
            torch.cuda.empty_cache()

    def _copy(self, move: Callable[[_Storage], None], storages: Sequence[_Storage]) -> Future[torch.cuda.Event] | None:
        """Have copies made in their own stream, behind what the device was given before. A thread gives them to CUDA,
        which holds about a thousand and then keeps waiting who has more: an optimizer has several thousand tensors."""
        if self._stream is None:
            for storage in storages:
                move(storage)
            return None
        after = torch.cuda.current_stream(self._device).record_event()
        copies = self._thread.submit(_enqueue, move, storages, self._stream, after)
        self._under_way.append(copies)
        return copies

    def _allocate(self, storages: Sequence[_Storage]) -> None:
        """Give storages their memory. The driver takes as long to make thousands of them one by one as copying them
        takes; torch's allocator gets its memory in large blocks, and cuts them."""
        block: list[_Storage] = []
        size = 0
        for storage in storages:
            block.append(storage)
            size += -(-storage.size // _ROUNDED) * _ROUNDED
            if size >= _BLOCK or storage is storages[-1]:
                if self._stream is not None and len(block) > 1:
                    with suppress(torch.cuda.OutOfMemoryError):
                        torch.empty(size, dtype=torch.uint8, device=self._device)  # and freed: it stays in the cache
                for one in block:
                    one.allocate()
                block, size = [], 0

    def _storages(self, part: Part) -> Iterator[_Storage]:
        """The device storages of a part, each once; what another part owns is left to it."""
        weights = {t.untyped_storage().data_ptr() for t in self._tensors("weights")} if part == "optimizer" else set()
        seen: set[int] = set()
        room = self._keep if part == "optimizer" else 0
        for tensor in self._tensors(part):
            storage = tensor.untyped_storage()
            where = storage.data_ptr()
            # float32 weights are their own masters; optimizer state that lives on the host costs no device memory.
            if tensor.device.type != self._device.type or where == 0 or where in seen or where in weights:
                continue
            seen.add(where)
            size = storage.nbytes()
            if size <= room:
                room -= size
                continue
            yield _Storage(storage, size, None if part == "gradients" else self._host_buffer(size))

    def _host_buffer(self, size: int) -> list[torch.Tensor]:
        if self._spare.get(size):
            return self._spare[size].pop()
        return [self._carve(min(_PIECE, size - start)) for start in range(0, size, _PIECE)]

    def _carve(self, size: int) -> torch.Tensor:
        """Part of a large page-locked buffer: locking pages tensor by tensor would take longer than copying them."""
        if len(self._slab) < size and self._slabs:
            self._slab = self._slabs.pop()
        if len(self._slab) < size:
            on_gpu = self._device.type == "cuda"
            self._slab = _page_locked(self._device) if on_gpu else torch.empty(size, dtype=torch.uint8)
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


def _enqueue(
    move: Callable[[_Storage], None], storages: Sequence[_Storage], stream: torch.cuda.Stream, after: torch.cuda.Event
) -> torch.cuda.Event:
    # A thread's device is GPU 0 at first, and the end of the block below goes back to it: every other rank would get a
    # context there, half a GiB.
    torch.cuda.set_device(stream.device)
    with torch.cuda.stream(stream):
        stream.wait_event(after)
        for storage in storages:
            move(storage)
        return stream.record_event()


def _optimizer_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """Master weights and moments of dense and expert parameters."""
    for part in distributed_parts(optimizer):
        inner = part.optimizer
        for group in inner.param_groups:
            for parameter in group["params"]:
                yield parameter.data
                yield from (v for v in inner.state.get(parameter, {}).values() if torch.is_tensor(v))


@cache
def _touch_before_locking() -> None:
    """Have torch touch pages before CUDA locks them, unless the environment says otherwise. CUDA's own memory is made,
    and zeroed, under a lock for which every other call waits: those of the first hand-over, beside `prepare`."""
    given = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    # All of it: what is not named goes back to its default. Of a name that comes twice the last one counts.
    settings = f"pinned_use_cuda_host_register:True,pinned_num_register_threads:8,{given.rstrip(', ')}"
    torch._C._accelerator_setAllocatorSettings(settings.rstrip(","))


def _page_locked(device: torch.device) -> torch.Tensor:
    _touch_before_locking()
    torch.cuda.set_device(device)
    return torch.empty(_PIECE, dtype=torch.uint8, pin_memory=True)
