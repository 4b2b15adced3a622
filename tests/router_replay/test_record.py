from __future__ import annotations

import numpy as np
import pytest

from megatron_dppo.router_replay.record import RouteError, RouteSchema, record_routes
from megatron_dppo.router_replay.routes import Routes, route_dtype

SCHEMA = RouteSchema(hidden_layers=4, moe_layers=(1, 3), num_experts=8, topk=2)
LENGTHS = np.array([3, 5])
REQUESTS = ("0/0/0", "0/1/0")


def captured(seed: int = 0, schema: RouteSchema = SCHEMA) -> list[np.ndarray]:
    """What vLLM returns: all hidden layers, dense ones zero, one row less than tokens."""
    rng = np.random.default_rng(seed)
    every = []
    for length in LENGTHS:
        routes = np.zeros((length - 1, schema.hidden_layers, schema.topk), dtype=np.uint8)
        for token in range(length - 1):
            for layer in schema.moe_layers:
                routes[token, layer] = rng.permutation(schema.num_experts)[: schema.topk]
        every.append(routes)
    return every


def test_rows_land_on_their_tokens_and_dense_layers_are_dropped() -> None:
    parts = captured()
    routes = record_routes(parts, LENGTHS, SCHEMA, REQUESTS)
    assert routes.experts.shape == (8, 2, 2)
    assert routes.valid.tolist() == [True, True, False, True, True, True, True, False]
    np.testing.assert_array_equal(routes.experts[0:2], parts[0][:, [1, 3]])
    np.testing.assert_array_equal(routes.experts[3:7], parts[1][:, [1, 3]])
    assert not routes.experts[[2, 7]].any()
    assert routes.num_experts == 8


def test_planted_faults_are_each_refused_by_name() -> None:
    def refused(message: str, change) -> None:
        parts = captured()
        change(parts)
        with pytest.raises(RouteError, match=message):
            record_routes(parts, LENGTHS, SCHEMA, REQUESTS)

    def absent(parts: list) -> None:
        parts[1] = None

    def short(parts: list) -> None:
        parts[0] = parts[0][:-1]

    def long(parts: list) -> None:
        parts[0] = np.concatenate([parts[0], parts[0][:1]])

    def fewer_layers(parts: list) -> None:
        parts[0] = parts[0][:, :3]

    def floats(parts: list) -> None:
        parts[0] = parts[0].astype(np.float32)

    def physical_id(parts: list) -> None:
        parts[1][2, 3, 0] = 8

    def sentinel(parts: list) -> None:
        parts[1] = parts[1].astype(np.int16)
        parts[1][0, 1, 1] = -1

    def twice(parts: list) -> None:
        parts[1][3, 1] = [5, 5]

    def zero_layer(parts: list) -> None:
        parts[0][:, 3] = 0

    def lost_span(parts: list) -> None:
        parts[1][1:3] = 0

    def routing_dense_layer(parts: list) -> None:
        parts[0][1, 2] = [3, 4]

    refused("0/1/0: the engine returned no routes", absent)
    refused(r"0/0/0: routes have shape \(1, 4, 2\), expected \(2, 4, 2\)", short)
    refused(r"0/0/0: routes have shape \(3, 4, 2\)", long)
    refused(r"0/0/0: routes have shape \(2, 3, 2\)", fewer_layers)
    refused("float32, expected expert numbers", floats)
    refused("0/1/0: token 2 went to expert 8 in layer 3, the model has 8", physical_id)
    refused("0/1/0: token 0 went to expert -1 in layer 1", sentinel)
    refused(r"0/1/0: a token has one expert twice in layer 1: \[5, 5\]", twice)
    refused(r"0/0/0: no routes for 2 \(token, layer\) pairs, first in layer 3", zero_layer)
    refused(r"0/1/0: no routes for 4 \(token, layer\) pairs, first in layer 1", lost_span)
    refused("0/0/0: layer 2 routed tokens although", routing_dense_layer)


def test_one_expert_per_token_is_checked_over_the_whole_batch() -> None:
    schema = RouteSchema(hidden_layers=2, moe_layers=(0, 1), num_experts=4, topk=1)
    few = [np.zeros((9, 2, 1), dtype=np.uint8)]
    assert record_routes(few, np.array([10]), schema, ("a",)).valid.sum() == 9  # may be chance
    many = [np.ones((99, 2, 1), dtype=np.uint8)]
    many[0][:, 1] = 0
    with pytest.raises(RouteError, match="layer 1 sent every token of the batch to expert 0"):
        record_routes(many, np.array([100]), schema, ("a",))


def test_the_type_comes_from_the_model_not_from_the_data() -> None:
    assert [route_dtype(n) for n in (8, 256, 257, 65536, 65537)] == [
        np.uint8,
        np.uint8,
        np.uint16,
        np.uint16,
        np.uint32,
    ]
    with pytest.raises(ValueError, match="at least 1"):
        route_dtype(0)
    schema = RouteSchema(4, (1, 3), num_experts=300, topk=2)
    routes = record_routes([part.astype(np.uint16) for part in captured()], LENGTHS, schema, REQUESTS)
    assert routes.experts.dtype == np.uint16


def test_routes_of_different_models_are_not_joined() -> None:
    one = record_routes(captured(), LENGTHS, SCHEMA, REQUESTS)
    other = Routes(one.experts, one.valid, num_experts=16)
    with pytest.raises(ValueError, match="parts of one model"):
        Routes.concatenate([one, other])
    with pytest.raises(ValueError, match="must be uint16"):
        Routes(one.experts, one.valid, num_experts=300)
    with pytest.raises(ValueError, match="must be bool"):
        Routes(one.experts, one.valid[:-1], num_experts=8)
    joined = Routes.concatenate([one, one])
    assert len(joined) == 16
    assert joined.nbytes == 16 * (2 * 2 + 1) + 16
