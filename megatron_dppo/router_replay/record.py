"""From the engine's routed experts to `Routes`, with every arrival check.

vLLM returns, per sequence, `[prompt + generated - 1, hidden_layers, topk]`: the last sampled token never went through
the model, and dense layers are zero rows. A fault on the way (a kernel that bypasses the capture, a lost span, ids of
another numbering) keeps the shape and fills in zeros or nonsense, so values are checked as well as shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_dppo.router_replay.routes import Routes, route_dtype

_TOP1_WITNESSES = 64
"""With one expert per token a zero may be a choice; this many in a row are taken for a fault."""


class RouteError(ValueError):
    """The engine's routes cannot be what the model did. Training on them would be wrong, so nothing continues."""


@dataclass(frozen=True)
class RouteSchema:
    """What routes of a model look like."""

    hidden_layers: int
    """All transformer layers, as vLLM counts them."""
    moe_layers: tuple[int, ...]
    """Numbers of those that route, in order."""
    num_experts: int
    """Experts per such layer."""
    topk: int
    """Experts per token."""


def record_routes(
    captured: Sequence[np.ndarray | None], lengths: np.ndarray, schema: RouteSchema, request_ids: Sequence[str]
) -> Routes:
    """`Routes` of all sequences, concatenated: `sum(lengths)` rows.

    captured    per sequence what vLLM returned, `[length - 1, hidden_layers, topk]`
    lengths     int `[B]`, tokens of each sequence, prompt included
    request_ids named in errors

    The last row of every sequence is marked not valid. Raises `RouteError` naming the request, layer and token for
    absent routes, another shape, ids out of range, a dense layer that routes, an expert twice in one row, and a MoE
    layer that stayed zero: with topk > 1 any all-zero row is one, with topk = 1 a layer that sent all of 64 or more
    tokens to expert 0.
    """
    tokens = int(np.sum(lengths))
    dtype = route_dtype(schema.num_experts)
    experts = np.zeros((tokens, len(schema.moe_layers), schema.topk), dtype=dtype)
    valid = np.ones(tokens, dtype=np.bool_)
    columns = np.asarray(schema.moe_layers, dtype=np.int64)
    dense = np.setdiff1d(np.arange(schema.hidden_layers), columns)
    every_layer = len(dense) == 0
    stop = 0
    for routes, length, request in zip(captured, np.asarray(lengths).tolist(), request_ids, strict=True):
        start, stop = stop, stop + length
        valid[stop - 1] = False
        expected = (length - 1, schema.hidden_layers, schema.topk)
        if routes is None:
            raise RouteError(
                f"request {request}: the engine returned no routes; it must run with enable_return_routed_experts"
            )
        if routes.shape != expected:
            raise RouteError(
                f"request {request}: routes have shape {routes.shape}, expected {expected} "
                "(prompt + generated - 1, hidden layers, top-k)"
            )
        if not np.issubdtype(routes.dtype, np.integer):
            raise RouteError(f"request {request}: routes are {routes.dtype}, expected expert numbers")
        outside = (routes < 0) | (routes >= schema.num_experts)
        if outside.any():
            token, layer, choice = (int(i) for i in np.argwhere(outside)[0])
            raise RouteError(
                f"request {request}: token {token} went to expert {int(routes[token, layer, choice])} in layer "
                f"{layer}, the model has {schema.num_experts}; physical ids of a load balancer cannot be replayed"
            )
        if every_layer:
            experts[start : stop - 1] = routes
            continue
        if routes[:, dense].any():
            layer = int(dense[routes[:, dense].any(axis=(0, 2)).argmax()])
            raise RouteError(
                f"request {request}: layer {layer} routed tokens although the model's layer pattern calls it dense "
                f"(mixture-of-experts layers: {list(schema.moe_layers)})"
            )
        experts[start : stop - 1] = routes[:, columns]
    _check_rows(experts, valid, schema, request_ids, np.cumsum(lengths))
    return Routes(experts, valid, schema.num_experts)


def _check_rows(
    experts: np.ndarray, valid: np.ndarray, schema: RouteSchema, request_ids: Sequence[str], stops: np.ndarray
) -> None:
    """No layer of a sequence all zero, no expert twice in a row."""
    if schema.topk > 1:
        routed = experts.any(axis=2)  # a row of distinct experts holds at most one zero
        missing = valid[:, None] & ~routed
        if missing.any():
            row, layer = (int(i) for i in np.argwhere(missing)[0])
            raise RouteError(
                f"request {_owner(row, request_ids, stops)}: no routes for {int(missing.sum())} (token, layer) pairs, "
                f"first in layer {schema.moe_layers[layer]}; the engine's kernel of that layer bypasses the capture, "
                "or a span was lost"
            )
    ordered = np.sort(experts, axis=2)
    twice = valid[:, None] & (ordered[:, :, 1:] == ordered[:, :, :-1]).any(axis=2)
    if twice.any():
        row, layer = (int(i) for i in np.argwhere(twice)[0])
        raise RouteError(
            f"request {_owner(row, request_ids, stops)}: a token has one expert twice in layer "
            f"{schema.moe_layers[layer]}: {experts[row, layer].tolist()}"
        )
    if schema.topk == 1 and schema.num_experts > 1 and valid.sum() >= _TOP1_WITNESSES:
        silent = ~experts[valid].any(axis=(0, 2))
        if silent.any():
            raise RouteError(
                f"layer {schema.moe_layers[int(np.argmax(silent))]} sent every token of the batch to expert 0; "
                "the engine's kernel of that layer bypasses the capture"
            )


def _owner(row: int, request_ids: Sequence[str], stops: np.ndarray) -> str:
    return request_ids[int(np.searchsorted(stops, row, side="right"))]
