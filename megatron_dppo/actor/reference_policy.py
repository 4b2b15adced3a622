"""The policy that training began with, for a KL to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from megatron_dppo.models.live import buffers
from megatron_dppo.models.lora.attach import adapters

_PIECE, _ALIGNMENT = 1 << 28, 256
"""Bytes of one host buffer and of what the device holds twice during an exchange; where a weight begins in it."""


class ReferencePolicy:
    """Makes a rank's model the reference for as long as a pass takes.

    With adapters the reference is the model without them: they are switched off, at no cost. Without, the weights of
    this rank at the time of construction are kept in (page-locked) host memory, 2 bytes a parameter in bfloat16, and
    change places with the trained ones, a buffer at a time, bit for bit. What is derived from weights (master weights,
    the optimizer) is not touched, so nothing may be trained inside. No collectives.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._adapters = list(adapters(chunks))
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        if not self._adapters:
            unique: dict[int, torch.Tensor] = {id(p): p for chunk in chunks for p in chunk.parameters()}
            unique |= {id(b): b for chunk in chunks for _, b in buffers(chunk)}
            left = sum(_bytes(p) for p in unique.values())
            slab = torch.empty(0, dtype=torch.uint8)
            for parameter in unique.values():
                size = parameter.numel() * parameter.element_size()
                if len(slab) < size:
                    slab = torch.empty(max(size, min(_PIECE, left)), dtype=torch.uint8, pin_memory=parameter.is_cuda)
                host, slab = slab[:size].view(parameter.dtype), slab[_bytes(parameter) :]
                left -= _bytes(parameter)
                host.copy_(parameter.data.view(-1))
                self._kept.append((parameter, host))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model is the reference; afterwards, also after an error, it is what it was before."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for adapter in self._adapters:
            adapter.off = not adapter.off
        for parameter, host in self._kept:
            rows = max(1, _PIECE // parameter.element_size())
            for live, kept in zip(parameter.data.view(-1).split(rows), host.split(rows), strict=True):
                now = live.clone()
                live.copy_(kept)
                kept.copy_(now)


def _bytes(parameter: torch.Tensor) -> int:
    """Of a host buffer, with what keeps the next weight aligned."""
    return -(-parameter.numel() * parameter.element_size() // _ALIGNMENT) * _ALIGNMENT
