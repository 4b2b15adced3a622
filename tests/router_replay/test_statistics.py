"""Load and overlap against counting by hand."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_dppo.router_replay.routes import Routes
from megatron_dppo.router_replay.statistics import load, overlap
from tests.router_replay.test_layout import random_routes


def test_load_is_counted_over_routed_rows() -> None:
    experts = np.array([[[0, 1]], [[0, 2]], [[0, 1]], [[3, 3]]], dtype=np.uint8)
    loads = load(Routes(experts, np.array([True, True, True, False]), 4))
    np.testing.assert_allclose(loads.share, [[3 / 6, 2 / 6, 1 / 6, 0]])
    assert loads.busiest.tolist() == [2.0]
    assert loads.unused.tolist() == [1]
    entropy = -(0.5 * np.log(0.5) + np.log(1 / 3) / 3 + np.log(1 / 6) / 6)
    np.testing.assert_allclose(loads.effective, [np.exp(entropy)])
    with pytest.raises(ValueError, match="no token of these routes"):
        load(Routes.gaps(3, 1, 2, 4))


def test_overlap_compares_sets_of_rows_that_both_have() -> None:
    one, other = (random_routes(50, layers=3, topk=3, experts=6, seed=seed) for seed in (1, 2))
    got = overlap(one, other)
    rows = [t for t in range(50) if one.valid[t] and other.valid[t]]
    assert got.rows == len(rows) < 50
    for layer in range(3):
        sizes = [len({*one.experts[t, layer]} & {*other.experts[t, layer]}) for t in rows]
        assert got.common[layer] == pytest.approx(np.mean(sizes) / 3)
        assert got.identical[layer] == pytest.approx(np.mean([size == 3 for size in sizes]))
    swapped = Routes(one.experts[:, :, ::-1], one.valid, 6)
    assert overlap(one, swapped).identical.tolist() == [1.0] * 3, "order within a row does not matter"
    with pytest.raises(ValueError, match="not of the same tokens and model"):
        overlap(one, random_routes(49, layers=3, topk=3, experts=6, seed=0))
