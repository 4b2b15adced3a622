"""What a full sync must bring: which tensors, and a few numbers that tell whether the bytes that a worker loaded are
those that their owner packed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open

from megatron_dppo.checkpoint.hf_files import refuse_damaged
from megatron_dppo.checkpoint.weight_layout import BucketLayout, Segment
from megatron_dppo.errors import UserError


class IncompleteSync(RuntimeError):
    """A sync brought other tensors than the engine's model has. The engine refuses to generate until a full one."""


class ChecksumMismatch(RuntimeError):
    """A worker loaded other bytes than the trainer packed. The engine refuses to generate until a sync succeeds."""


class Manifest:
    """Names and shapes of the checkpoint the engine was started from; `expected=None` learns them from the first sync
    (an engine started from random weights has no checkpoint)."""

    def __init__(self, expected: Mapping[str, tuple[int, ...]] | None, *, tied_embeddings: bool = False) -> None:
        self._optional = {"lm_head.weight"} if tied_embeddings else set()
        self._expected = None if expected is None else {n: s for n, s in expected.items() if n not in self._optional}
        self._seen: dict[str, tuple[int, ...]] = {}

    def begin(self) -> None:
        self._seen = {}

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise `IncompleteSync` for a tensor that comes twice, is unknown, or has another shape."""
        if name in self._seen:
            raise IncompleteSync(f"{name} came twice in one weight sync")
        self._seen[name] = tuple(shape)
        if self._expected is None or name in self._optional:
            return
        if name not in self._expected:
            raise IncompleteSync(f"{name} is not a tensor of the engine's model")
        if tuple(shape) != self._expected[name]:
            raise IncompleteSync(f"{name} has shape {tuple(shape)}, the engine's model has {self._expected[name]}")

    def end(self) -> None:
        """Raise `IncompleteSync` naming what did not come."""
        if self._expected is None:
            self._expected = {n: s for n, s in self._seen.items() if n not in self._optional}
        missing = sorted(self._expected.keys() - self._seen.keys())
        if missing:
            raise IncompleteSync(f"{len(missing)} tensors did not come, first {missing[0]}")

    def check_layouts(self, layouts: Sequence[BucketLayout]) -> None:
        """All of the above, of a sync in these buckets. A tensor that goes to several workers in parts counts as soon
        as all of it does."""
        self.begin()
        parts: dict[str, int] = {}
        for layout in layouts:
            for slot in layout.slots:
                for name in slot.names():
                    if layout.share is not None:
                        parts[name] = parts.get(name, 0) + slot.nbytes // slot.count
                        if parts[name] < prod(slot.shape) * getattr(torch, slot.dtype).itemsize:
                            continue
                    self.check(name, slot.shape)
        self.end()


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes from the headers of a folder's safetensors files; no tensor is read."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder}: no .safetensors file; the engine needs a Hugging Face checkpoint in that format")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with refuse_damaged(file), safe_open(file, "pt") as stored:
            shapes |= {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}  # noqa: SIM118
    return shapes


SAMPLE_BYTES = 1 << 18
"""Checked of each bucket."""


def sampled(index: int, layout: BucketLayout) -> Segment:
    """The bytes of bucket `index` that are checked: the beginning of one sender's share, another one in each bucket."""
    segment = layout.segments[index % len(layout.segments)]
    return Segment(segment.source, segment.start, min(segment.stop, segment.start + SAMPLE_BYTES))


def checksum(payload: torch.Tensor, part: Segment) -> torch.Tensor:
    """int64 scalar on the payload's device: the bytes' sum, each times one more than its place. No synchronisation."""
    values = payload[part.start : part.stop].long()
    return (values * torch.arange(1, len(values) + 1, device=values.device)).sum()


def values_of(sums: Mapping[int, torch.Tensor]) -> dict[int, int]:
    """Checksums as numbers. Waits for the device, once, and on a GPU not for copies to the host that other streams and
    processes have under way: the engine that copies would take theirs first, gigabytes of optimizer state."""
    if not sums:
        return {}
    values = torch.stack(list(sums.values()))
    if values.is_cuda:
        host = torch.empty_like(values, device="cpu", pin_memory=True)
        torch.add(values, 0, out=_as_seen_by_kernels(host, values.device))  # a kernel's store, where `copy_` is a copy
        torch.cuda.current_stream(values.device).synchronize()
        values = host
    return dict(zip(sums, values.tolist(), strict=True))


def _as_seen_by_kernels(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Page-locked memory of the host, which has one address for processor and GPU, as a tensor of the GPU."""
    storage = torch._C._construct_storage_from_data_pointer(host.data_ptr(), device, host.nbytes)
    return torch.empty(0, dtype=host.dtype, device=device).set_(storage, 0, host.shape, host.stride())


class Packed:
    """Checksums of what this rank packed for the sync under way."""

    def __init__(self) -> None:
        self._rank = dist.get_rank()
        self._sums: dict[int, torch.Tensor] = {}

    def note(self, index: int, layout: BucketLayout, payload: torch.Tensor) -> None:
        """Bucket `index` was packed; no synchronisation."""
        part = sampled(index, layout)
        if part.source == self._rank:
            self._sums[index] = checksum(payload, part)

    def take(self) -> dict[int, int]:
        """Of the buckets that this rank noted; forgets them. Waits for the device."""
        sums, self._sums = self._sums, {}
        return values_of(sums)


def gathered(sums: Mapping[int, int], control: dist.ProcessGroup | None = None) -> dict[int, int]:
    """Checksums of every bucket, on every rank, of those that each one took. Collective over `control`, or the
    world."""
    found: list[Mapping[int, int]] = [{}] * dist.get_world_size()
    dist.all_gather_object(found, sums, group=control)
    return {index: value for one in found for index, value in one.items()}
