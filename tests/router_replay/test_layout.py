"""Slicing of routes against the brute-force definition."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dppo.router_replay.layout import PADDING_ROW, local_routes
from megatron_dppo.router_replay.routes import Routes


def random_routes(tokens: int, layers: int, topk: int, experts: int, seed: int) -> Routes:
    rng = np.random.default_rng(seed)
    chosen = np.argsort(rng.random((tokens, layers, experts)), axis=-1)[..., :topk].astype(np.uint8)
    return Routes(chosen, rng.random(tokens) < 0.8, experts)


@given(st.integers(0, 40), st.integers(0, 3), st.sampled_from([1, 2, 4]), st.integers(0, 10_000))
def test_ranks_and_stages_together_hold_every_row_once(tokens, extra, ranks, seed):
    routes = random_routes(max(tokens, 1), layers=4, topk=2, experts=8, seed=seed)
    padded = -(-max(tokens + extra, 1) // ranks) * ranks
    pack_rows = np.append(np.arange(tokens), np.full(padded - tokens, PADDING_ROW))
    share = padded // ranks
    for layers in ([0, 1], [2, 3]):
        for rank in range(ranks):
            part = local_routes(routes, pack_rows, slice(rank * share, (rank + 1) * share), layers)
            for local in range(share):
                row = rank * share + local
                if row < tokens:
                    assert part.real[local]
                    assert part.forced[local] == routes.valid[row]
                    assert (part.experts[local] == routes.experts[row][layers]).all()
                else:
                    assert not part.real[local]
                    assert part.forced[local]


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
