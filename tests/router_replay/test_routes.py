"""The value object: weight-version spans, views, what it costs to hand over."""

from __future__ import annotations

import pickle
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dppo.router_replay.routes import UNSTATED_VERSION, Routes


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


def test_tokens_outside_the_record_are_refused() -> None:
    with pytest.raises(ValueError, match="are not within the 5"):
        make(5).between(3, 6)


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
