"""Slicing of routes against the brute-force definition."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dppo.router_replay.layout import PADDING_ROW, LocalRoutes, local_routes, sequence_parallel_rows
from megatron_dppo.router_replay.routes import Routes


def random_routes(tokens: int, layers: int, topk: int, experts: int, seed: int) -> Routes:
    rng = np.random.default_rng(seed)
    chosen = np.argsort(rng.random((tokens, layers, experts)), axis=-1)[..., :topk].astype(np.uint8)
    return Routes(chosen, rng.random(tokens) < 0.8, experts)


@dataclass(frozen=True)
class Layout:
    """One way to spread a pack: sequence lengths, MoE layers per model chunk, and ranks."""

    lengths: list[int]
    chunks: list[list[int]]
    context: int
    tensor: int


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    moe_layers = draw(st.integers(1, 6))
    parts = draw(st.integers(1, 4))  # pipeline stages x virtual chunks; some hold no MoE layer
    owner = sorted(draw(st.lists(st.integers(0, parts - 1), min_size=moe_layers, max_size=moe_layers)))
    return Layout(
        lengths=draw(st.lists(st.integers(1, 13), max_size=5)),
        chunks=[[i for i, o in enumerate(owner) if o == part] for part in range(parts)],
        context=draw(st.sampled_from([1, 2, 3, 4])),
        tensor=draw(st.sampled_from([1, 2, 4])),
    )


def pack(layout: Layout) -> tuple[np.ndarray, list[int]]:
    """Row numbers of the pack and the padded lengths: every sequence padded to a multiple of 2 x context, then a
    sequence of nothing but padding that makes a context rank's share divisible among its tensor ranks."""
    unit = 2 * layout.context
    rows: list[int] = []
    padded = []
    first = 0
    for length in layout.lengths:
        whole = -(-length // unit) * unit
        rows += [*range(first, first + length), *[PADDING_ROW] * (whole - length)]
        padded.append(whole)
        first += length
    rest = -len(rows) % (unit * layout.tensor) or (unit * layout.tensor if not rows else 0)
    if rest:
        rows += [PADDING_ROW] * rest
        padded.append(rest)
    return np.array(rows, dtype=np.int64), padded


def context_rows(padded: list[int], rank: int, size: int) -> np.ndarray:
    """Written from the definition: of every sequence cut into 2 x size chunks, a rank holds chunks rank and
    2 size - 1 - rank, sequence after sequence."""
    chosen = []
    start = 0
    for length in padded:
        chunk = length // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            chosen += [start + number * chunk + i for i in range(chunk)]
        start += length
    return np.array(chosen, dtype=np.int64)


@given(layouts(), st.integers(0, 10_000))
def test_every_rank_gets_its_rows_and_layers_and_together_they_hold_all_of_them(layout: Layout, seed: int) -> None:
    routes = random_routes(sum(layout.lengths), layers=sum(map(len, layout.chunks)), topk=2, experts=8, seed=seed)
    pack_rows, padded = pack(layout)
    seen = np.zeros((len(routes), routes.moe_layers), dtype=np.int64)
    padding = np.zeros(8, dtype=np.int64)
    for context_rank in range(layout.context):
        zigzag = context_rows(padded, context_rank, layout.context)
        for tensor_rank in range(layout.tensor):
            local = sequence_parallel_rows(zigzag, tensor_rank, layout.tensor)
            for layers in layout.chunks:
                part = local_routes(routes, pack_rows, local, layers)
                check_part(part, routes, pack_rows, local, layers, seen)
            part = local_routes(routes, pack_rows, local, next(layers for layers in layout.chunks if layers))
            padding += np.bincount(part.experts[~part.real][:, 0].ravel(), minlength=8)
    assert (seen == 1).all(), "every (token, layer) is on exactly one rank"
    assert padding.max() - padding.min() <= 1, "the ranks of a pack load the experts evenly with padding"


def check_part(part: LocalRoutes, routes: Routes, pack_rows, local, layers: list[int], seen: np.ndarray) -> None:
    assert part.experts.shape == (len(local), len(layers), routes.topk)
    assert part.experts.dtype == routes.experts.dtype
    for position, row_of_pack in enumerate(local):
        row = pack_rows[row_of_pack]
        assert part.real[position] == (row != PADDING_ROW)
        if row == PADDING_ROW:
            assert part.forced[position]
            continue
        assert part.forced[position] == routes.valid[row]
        for column, layer in enumerate(layers):
            assert part.experts[position, column].tolist() == routes.experts[row, layer].tolist()
            seen[row, layer] += 1


@given(layouts())
def test_a_slice_is_the_same_as_its_rows(layout: Layout) -> None:
    routes = random_routes(sum(layout.lengths), layers=4, topk=2, experts=8, seed=0)
    pack_rows, _ = pack(layout)
    half = len(pack_rows) // 2
    one = local_routes(routes, pack_rows, slice(half, None), [1, 3])
    other = local_routes(routes, pack_rows, np.arange(half, len(pack_rows)), [1, 3])
    for name in ("experts", "forced", "real"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_packs_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="7 rows cannot be split over 2 sequence-parallel ranks; pad it first"):
        sequence_parallel_rows(np.arange(7), 0, 2)


@pytest.mark.parametrize(("experts", "topk", "expert_ranks"), [(8, 2, 4), (128, 8, 8), (6, 3, 2)])
@pytest.mark.parametrize("padding", [1, 2, 5, 7, 16, 33])
def test_padding_is_spread_over_expert_parallel_ranks(experts, topk, expert_ranks, padding):
    routes = random_routes(3, layers=2, topk=topk, experts=experts, seed=0)
    pack_rows = np.append(np.arange(3), np.full(padding, PADDING_ROW))
    part = local_routes(routes, pack_rows, slice(None), [0, 1])
    chosen = part.experts[~part.real][:, 0]
    assert all(len(set(row)) == topk for row in chosen.tolist()), "an expert twice in a row breaks the dispatcher"
    load = np.bincount(chosen.ravel(), minlength=experts)
    assert load.max() - load.min() <= 1
    per_rank = load.reshape(expert_ranks, -1).sum(axis=1)
    assert per_rank.max() - per_rank.min() <= experts // expert_ranks
