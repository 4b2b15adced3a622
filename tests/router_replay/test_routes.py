"""The value object: weight-version spans, turns, views, bytes."""

from __future__ import annotations

import pickle
from itertools import pairwise
from multiprocessing.shared_memory import SharedMemory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dppo.router_replay.routes import UNSTATED_VERSION, Routes
from megatron_dppo.router_replay.wire import BadRouteBytes, routes_from, routes_to_bytes, wire_size, write_routes


def make(tokens: int, seed: int = 0, *, layers: int = 3, topk: int = 2, experts: int = 8, versions: int = 3) -> Routes:
    rng = np.random.default_rng(seed)
    chosen = np.argsort(rng.random((tokens, layers, experts)), axis=-1)[..., :topk]
    dtype = np.uint8 if experts <= 256 else np.uint16
    routes = Routes(chosen.astype(dtype), rng.random(tokens) < 0.8, experts)
    return routes.routed_under(np.sort(rng.integers(0, versions, tokens)))


def same(one: Routes, other: Routes) -> None:
    np.testing.assert_array_equal(one.experts, other.experts)
    np.testing.assert_array_equal(one.valid, other.valid)
    np.testing.assert_array_equal(one.spans, other.spans)
    assert one.experts.dtype == other.experts.dtype
    assert one.num_experts == other.num_experts


@given(st.lists(st.integers(0, 2), min_size=0, max_size=20), st.data())
def test_spans_follow_their_tokens(versions: list[int], data: st.DataObject) -> None:
    """Against versions kept token by token: slices, selections and concatenations keep each token's own."""
    tokens = len(versions)
    routes = make(tokens).routed_under(np.array(versions, dtype=np.int64))
    np.testing.assert_array_equal(routes.weight_versions[:tokens], versions)
    assert len(routes.spans) == max(1, sum(a != b for a, b in pairwise(versions)) + 1)
    start = data.draw(st.integers(0, tokens))
    stop = data.draw(st.integers(start, tokens))
    part = routes.between(start, stop)
    np.testing.assert_array_equal(part.weight_versions, versions[start:stop])
    np.testing.assert_array_equal(part.experts, routes.experts[start:stop])
    assert start == stop or np.shares_memory(part.experts, routes.experts)
    rows = np.array(data.draw(st.lists(st.integers(0, tokens - 1), max_size=10)) if tokens else [], dtype=np.int64)
    np.testing.assert_array_equal(routes.take(rows).weight_versions, np.array(versions, dtype=np.int64)[rows])
    joined = Routes.concatenate([part, routes, part])
    np.testing.assert_array_equal(joined.weight_versions, versions[start:stop] + versions + versions[start:stop])


def test_a_record_says_when_it_does_not_know_its_weights() -> None:
    routes = Routes(np.zeros((2, 1, 1), dtype=np.uint8), np.ones(2, dtype=bool), 4)
    assert routes.weight_versions.tolist() == [UNSTATED_VERSION] * 2
    for spans in ([[1, 0]], [[0, 0], [0, 1]], [[0, 0], [2, 1]], np.zeros((0, 2))):
        with pytest.raises(ValueError, match="spans must start at token 0 and rise"):
            Routes(routes.experts, routes.valid, 4, np.array(spans, dtype=np.int64))
    with pytest.raises(ValueError, match=r"spans must be int64 \[spans, 2\]"):
        Routes(routes.experts, routes.valid, 4, np.array([0, 0]))
    with pytest.raises(ValueError, match="3 weight versions for 2 tokens"):
        routes.routed_under(np.zeros(3))


def test_bytes_per_token_are_those_of_the_paper_model() -> None:
    routes = Routes.gaps(10, moe_layers=48, topk=8, num_experts=128)
    assert routes.bytes_per_token == 385
    assert routes.nbytes == 10 * 385 + 16
    assert not routes.valid.any()
    assert Routes.gaps(1, moe_layers=58, topk=8, num_experts=512).bytes_per_token == 58 * 8 * 2 + 1


@pytest.mark.parametrize("delta", [False, True])
def test_turns_are_appended_and_sampled_tokens_keep_their_own_forward(delta: bool) -> None:
    """Three turns, written out token by token: what had a route keeps it, the rest comes from the later prefill."""
    lengths = [5, 9, 14]
    turns = []
    for number, length in enumerate(lengths):
        turn = make(length, seed=number)
        valid = np.ones(length, dtype=bool)
        valid[-1] = False
        turns.append(Routes(turn.experts, valid, 8).routed_under(np.full(length, number)))
    so_far = turns[0]
    for number in (1, 2):
        start = lengths[number - 1] - 1 if delta else 0
        so_far = so_far.append_turn(turns[number].between(start, lengths[number]), start=start)
    owner = [0] * 4 + [1] * 4 + [2] * 6
    expected = np.stack([turns[o].experts[t] for t, o in enumerate(owner)])
    np.testing.assert_array_equal(so_far.experts, expected)
    assert so_far.weight_versions.tolist() == owner
    assert so_far.valid.tolist() == [True] * 13 + [False]
    assert so_far.spans.tolist() == [[0, 0], [4, 1], [8, 2]]


def test_turns_that_do_not_fit_are_refused() -> None:
    first = make(5)
    valid = np.array([True, True, True, True, False])
    first = Routes(first.experts, valid, 8)
    with pytest.raises(ValueError, match="start at token 5, but the record so far ends at token 4"):
        first.append_turn(make(3), start=5)
    with pytest.raises(ValueError, match="has 4 tokens, fewer than the 5"):
        first.append_turn(make(4))
    with pytest.raises(ValueError, match="different models"):
        first.append_turn(make(8, experts=16))
    with pytest.raises(ValueError, match="are not within the 5"):
        first.between(3, 6)


@pytest.mark.parametrize("experts", [8, 300])
@pytest.mark.parametrize("tokens", [0, 1, 17])
def test_bytes_come_back_as_the_same_routes(tokens: int, experts: int) -> None:
    routes = make(tokens, experts=experts)
    raw = routes_to_bytes(routes)
    assert len(raw) == wire_size(routes)
    same(routes_from(raw), routes)
    same(routes_from(bytes(raw) + b"padding of a page"), routes)


def test_foreign_and_cut_bytes_are_refused() -> None:
    raw = bytes(routes_to_bytes(make(6)))
    with pytest.raises(BadRouteBytes, match="too few for the header"):
        routes_from(raw[:10])
    with pytest.raises(BadRouteBytes, match=r"bytes, \d+ came"):
        routes_from(raw[:-1])
    with pytest.raises(BadRouteBytes, match="not routes of this format"):
        routes_from(pickle.dumps(make(6)))
    with pytest.raises(BadRouteBytes, match="neither 0 nor 1"):
        routes_from(raw[:-1] + b"\x07")
    spans_start = 40
    with pytest.raises(BadRouteBytes, match="must start at token 0"):
        routes_from(raw[:spans_start] + b"\x01" + raw[spans_start + 1 :])
    with pytest.raises(ValueError, match="bytes, the buffer has 3"):
        write_routes(make(6), bytearray(3))


def test_shared_memory_is_read_in_place() -> None:
    routes = make(100)
    memory = SharedMemory(create=True, size=wire_size(routes))
    try:
        assert write_routes(routes, memory.buf) == wire_size(routes)
        read = routes_from(memory.buf)
        same(read, routes)
        assert not read.experts.flags.writeable
        memory.buf[40 + routes.spans.nbytes] ^= 1  # a view sees the change, a copy would not
        assert read.experts[0, 0, 0] == routes.experts[0, 0, 0] ^ 1
        del read
    finally:
        memory.close()
        memory.unlink()


def test_pickle_protocol_5_carries_the_arrays_out_of_band() -> None:
    """What Ray does with a dataclass of arrays: the buffers are handed over, not copied into the stream."""
    routes = make(1000)
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(routes, protocol=5, buffer_callback=buffers.append)
    assert len(stream) < 1000
    read = pickle.loads(stream, buffers=[memoryview(b).toreadonly() for b in buffers])
    same(read, routes)
    assert np.shares_memory(read.experts, routes.experts)
    assert not read.experts.flags.writeable
