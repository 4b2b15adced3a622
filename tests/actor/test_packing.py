"""Packing: every sequence once, within the budget, the same number of microbatches everywhere."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dppo.actor.packing import SequenceTooLongError, plan_packs

lengths = st.lists(st.integers(1, 100), min_size=0, max_size=60).map(lambda n: np.array(n, dtype=np.int64))


@given(lengths, st.integers(100, 400), st.integers(1, 4), st.integers(1, 3))
def test_every_sequence_once_within_the_budget(lengths, budget, ranks, multiple):
    plan = plan_packs(lengths, budget=budget, data_parallel=ranks, microbatch_multiple=multiple)
    assert len(plan) == ranks
    assert len({len(packs) for packs in plan}) == 1
    assert len(plan[0]) % multiple == 0
    assert sorted(i for packs in plan for pack in packs for i in pack) == list(range(len(lengths)))
    assert all(lengths[pack].sum() <= budget for packs in plan for pack in packs)


@given(lengths, st.integers(1, 4))
def test_a_larger_budget_never_needs_more_microbatches(lengths, ranks):
    counts = [len(plan_packs(lengths, budget=b, data_parallel=ranks)[0]) for b in (100, 200, 400, 10_000)]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 1


def test_ranks_are_balanced_by_cost():
    lengths = np.array([100] * 8 + [10] * 80)
    plan = plan_packs(lengths, budget=1000, data_parallel=4)
    loads = [sum(lengths[pack].sum() for pack in packs) for packs in plan]
    assert max(loads) - min(loads) <= 10


def test_packing_is_good_enough():
    """64 sequences of 4 to 64 tokens under a budget of 256: at most one microbatch more than the tokens need."""
    lengths = np.random.default_rng(0).integers(4, 65, size=64)
    packs = plan_packs(lengths, budget=256, data_parallel=1)[0]
    assert len(packs) <= -(-lengths.sum() // 256) + 1


def test_a_sequence_over_the_budget_is_refused_by_number():
    with pytest.raises(SequenceTooLongError, match=r"sequence 1 has 300 tokens.*max_tokens_per_microbatch \(now 256\)"):
        plan_packs(np.array([10, 300]), budget=256, data_parallel=1)
