"""Routes as bytes: a fixed header and the arrays behind it. No pickle; reading makes views, not copies.

Layout, little-endian: magic (8 bytes), experts per layer, MoE layers, top-k (uint32 each), 4 bytes of zero, tokens,
spans (uint64 each); then `spans` int64 `[S, 2]`, `experts` `[N, L, k]` of the narrowest type, `valid` uint8 `[N]`.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np

from megatron_dppo.router_replay.routes import Routes, route_dtype

if TYPE_CHECKING:
    from collections.abc import Buffer

_HEADER = struct.Struct("<8sIIIIQQ")
_MAGIC = b"ROUTES\x00\x01"


class BadRouteBytes(ValueError):
    """The bytes are not routes, or not all of them."""


def wire_size(routes: Routes) -> int:
    """Bytes that `write_routes` fills."""
    return _HEADER.size + routes.nbytes


def write_routes(routes: Routes, into: Buffer) -> int:
    """Write routes to the start of a writable buffer (shared memory, a file map); returns the bytes written."""
    target = memoryview(into).cast("B")
    size = wire_size(routes)
    if len(target) < size:
        raise ValueError(f"routes need {size} bytes, the buffer has {len(target)}")
    _HEADER.pack_into(
        target,
        0,
        _MAGIC,
        routes.num_experts,
        routes.moe_layers,
        routes.topk,
        0,
        len(routes),
        len(routes.spans),
    )
    stop = _HEADER.size
    for array in (routes.spans, routes.experts, routes.valid):
        start, stop = stop, stop + array.nbytes
        view = np.frombuffer(target[start:stop], dtype=array.dtype).reshape(array.shape)
        np.copyto(view, array)
    return stop


def routes_to_bytes(routes: Routes) -> bytearray:
    """One copy of everything."""
    target = bytearray(wire_size(routes))
    write_routes(routes, target)
    return target


def routes_from(buffer: Buffer) -> Routes:
    """Routes whose arrays are read-only views of `buffer`, which they keep alive. Bytes past the end are ignored
    (shared memory comes in pages).

    Raises `BadRouteBytes` for foreign bytes, a cut end, a validity that is neither 0 nor 1, and sizes that no routes
    have.
    """
    source = memoryview(buffer).cast("B").toreadonly()
    if len(source) < _HEADER.size:
        raise BadRouteBytes(f"{len(source)} bytes are too few for the header of routes")
    magic, num_experts, layers, topk, zero, tokens, spans = _HEADER.unpack_from(source)
    if magic != _MAGIC or zero != 0 or num_experts < 1:
        raise BadRouteBytes(f"these are not routes of this format: they start with {bytes(source[:8])!r}")
    dtype = route_dtype(num_experts)
    sizes = (16 * spans, tokens * layers * topk * dtype.itemsize, tokens)
    expected = _HEADER.size + sum(sizes)
    if len(source) < expected:
        raise BadRouteBytes(f"routes of {tokens} tokens take {expected} bytes, {len(source)} came")
    start = _HEADER.size
    parts = []
    for size in sizes:
        parts.append(source[start : start + size])
        start += size
    validity = np.frombuffer(parts[2], dtype=np.uint8)
    if (validity > 1).any():
        raise BadRouteBytes("the validity of a token is neither 0 nor 1")
    try:
        return Routes(
            np.frombuffer(parts[1], dtype=dtype).reshape(tokens, layers, topk),
            validity.view(np.bool_),
            num_experts,
            np.frombuffer(parts[0], dtype=np.int64).reshape(spans, 2),
        )
    except ValueError as error:
        raise BadRouteBytes(str(error)) from error
