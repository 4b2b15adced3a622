"""All that is recorded of one response as one block of bytes: what crosses from vLLM's core to the client at its end.

Layout, little-endian: magic (8 bytes), tokens `G`, columns `W`, route rows `R`, layers `L`, top-k `k`, bytes per expert
id (uint32 each); then ids int32 `[G, W]`, log-probabilities float32 `[G, W]`, experts `[R, L, k]`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

HOLD = {"hold_record": True}
"""`SamplingParams.extra_args` of a request whose record is to come in one frame, at its end."""

_HEADER = struct.Struct("<8s6I")
_MAGIC = b"RECORD\x00\x01"
_EXPERT_TYPES: dict[int, np.dtype[Any]] = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32)}


class BadFrame(ValueError):
    """The bytes are not a record, or not all of it."""


@dataclass(frozen=True)
class ResponseRecord:
    """What the engine recorded of the `G` sampled tokens of one response."""

    ids: np.ndarray
    """int32 `[G, W]`, the sampled token, then the likeliest ids in rank order."""
    logp: np.ndarray
    """float32 `[G, W]`, their log-probabilities."""
    experts: np.ndarray | None
    """`[prompt + G - 1, L, k]` of an unsigned type; None where routes are not recorded."""

    def to_frame(self) -> np.ndarray:
        """uint8 `[bytes]`."""
        experts = np.zeros((0, 0, 0), dtype=np.uint8) if self.experts is None else self.experts
        parts = [self.ids.astype("<i4", copy=False), self.logp.astype("<f4", copy=False), experts]
        frame = np.empty(_HEADER.size + sum(p.nbytes for p in parts), dtype=np.uint8)
        _HEADER.pack_into(frame, 0, _MAGIC, *self.ids.shape, *experts.shape, experts.itemsize)
        stop = _HEADER.size
        for part in parts:
            start, stop = stop, stop + part.nbytes
            np.copyto(frame[start:stop].view(part.dtype).reshape(part.shape), part)
        return frame

    @staticmethod
    def from_frame(frame: np.ndarray) -> ResponseRecord:
        """Views of `frame`. Raises `BadFrame` for anything that `to_frame` did not write."""
        if frame.dtype != np.uint8 or frame.ndim != 1 or len(frame) < _HEADER.size:
            raise BadFrame(f"a record is uint8 [bytes], got {frame.dtype} {frame.shape}")
        magic, tokens, columns, rows, layers, topk, itemsize = _HEADER.unpack_from(frame)
        if magic != _MAGIC or itemsize not in _EXPERT_TYPES:
            raise BadFrame(f"these bytes are not a record: they start with {bytes(frame[:8])!r}")
        cells, choices = 4 * tokens * columns, rows * layers * topk * itemsize
        if len(frame) != _HEADER.size + 2 * cells + choices:
            raise BadFrame(
                f"a record of {tokens} tokens takes {_HEADER.size + 2 * cells + choices} bytes, {len(frame)} came"
            )
        body = frame[_HEADER.size :]
        try:
            experts = body[2 * cells :].view(_EXPERT_TYPES[itemsize]).reshape(rows, layers, topk)
            return ResponseRecord(
                ids=body[:cells].view("<i4").reshape(tokens, columns),
                logp=body[cells : 2 * cells].view("<f4").reshape(tokens, columns),
                experts=experts if rows and layers else None,
            )
        except ValueError as error:  # sizes beyond what an array may have, times zero
            raise BadFrame(f"a record has no such sizes: {error}") from None
