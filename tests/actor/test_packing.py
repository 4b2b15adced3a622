"""Packing: every sequence once, within the budget, the same number of microbatches everywhere, split over ranks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dppo.actor.pack_shape import PackShape, Split
from megatron_dppo.actor.packing import SequenceTooLongError, plan_packs
from megatron_dppo.batch.context_parallel import zigzag_rows

lengths = st.lists(st.integers(1, 100), min_size=0, max_size=60).map(lambda n: np.array(n, dtype=np.int64))
splits = st.builds(Split, context=st.sampled_from([1, 2, 3, 4]), sequence=st.sampled_from([1, 2, 4]))


@given(lengths, st.integers(112, 400), st.integers(1, 4), st.integers(1, 3), splits)
def test_every_sequence_once_within_the_budget(lengths, budget, ranks, multiple, split):
    plan = plan_packs(lengths, budget=budget, data_parallel=ranks, split=split, microbatch_multiple=multiple)
    assert len(plan.packs) == ranks
    assert len({len(packs) for packs in plan.packs}) == 1
    assert len(plan.packs[0]) % multiple == 0
    assert sorted(i for packs in plan.packs for pack in packs for i in pack) == list(range(len(lengths)))
    padded = [n + -n % (2 * split.context if split.context > 1 else 1) for n in lengths]
    assert all(sum(padded[i] for i in pack) <= budget for packs in plan.packs for pack in packs)
    assert plan.real_rows == lengths.sum()
    for packs, rows in zip(plan.packs, plan.rows, strict=True):
        for pack, total in zip(packs, rows, strict=True):
            assert total >= sum(padded[i] for i in pack)
            assert total % (split.context * split.sequence) == 0
            assert total > 0


@given(lengths, st.integers(1, 4))
def test_a_larger_budget_never_needs_more_microbatches(lengths, ranks):
    counts = [len(plan_packs(lengths, budget=b, data_parallel=ranks).packs[0]) for b in (100, 200, 400, 10_000)]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 1


@given(lengths, st.integers(20, 99), st.integers(1, 3))
def test_long_sequences_get_microbatches_of_their_own(lengths, budget, ranks):
    plan = plan_packs(lengths, budget=budget, data_parallel=ranks, long_sequences="alone")
    packs = [pack for packs in plan.packs for pack in packs]
    assert sorted(i for pack in packs for i in pack) == list(range(len(lengths)))
    assert all(len(pack) == 1 or lengths[pack].sum() <= budget for pack in packs)


def test_packs_can_be_made_equally_long():
    plan = plan_packs(np.array([7, 3, 5, 9]), budget=12, data_parallel=2, split=Split(sequence=2), equal_rows=True)
    assert {rows for of_rank in plan.rows for rows in of_rank} == {max(r for of_rank in plan.rows for r in of_rank)}
    assert plan.padded_rows == sum(map(sum, plan.rows))


def test_ranks_are_balanced_by_cost():
    lengths = np.array([100] * 8 + [10] * 80)
    plan = plan_packs(lengths, budget=1000, data_parallel=4)
    loads = [sum(lengths[pack].sum() for pack in packs) for packs in plan.packs]
    assert max(loads) - min(loads) <= 10
    assert 1.0 <= plan.imbalance < 1.01
    # A sequence of 8192 rows costs 8192 (1 + 1); 62 of 256 rows cost 62 * 256 (1 + 1/32), about the same.
    long = np.array([8192] + [256] * 62)
    shares = plan_packs(long, budget=16384, data_parallel=2).packs
    assert [len(pack) for packs in shares for pack in packs] == [1, 62]


def test_packing_is_good_enough():
    """64 sequences of 4 to 64 tokens under a budget of 256: at most one microbatch more than the tokens need."""
    lengths = np.random.default_rng(0).integers(4, 65, size=64)
    packs = plan_packs(lengths, budget=256, data_parallel=1).packs[0]
    assert len(packs) <= -(-lengths.sum() // 256) + 1


def test_a_sequence_over_the_budget_is_refused_by_number():
    with pytest.raises(SequenceTooLongError, match=r"sequence 1 has 300 tokens.*max_tokens_per_microbatch \(now 256\)"):
        plan_packs(np.array([10, 300]), budget=256, data_parallel=1)
    with pytest.raises(SequenceTooLongError, match=r"sequence 0 has 255 tokens.*at least 256"):  # padding counts
        plan_packs(np.array([255, 2]), budget=255, data_parallel=1, split=Split(context=2))


@given(st.lists(st.integers(1, 30), max_size=6), splits, st.integers(0, 3))
def test_rows_of_all_context_parallel_ranks_make_the_pack(lengths, split, more):
    lengths = np.array(lengths, dtype=np.int64)
    rows = split.pack_rows(lengths) + more * split.pack_multiple
    shape = PackShape.of(lengths, split, rows=rows)
    assert len(shape.source) == len(shape.position) == len(shape.sequence) == rows == shape.lengths.sum()
    # By definition: each sequence, then its padding, then the padding of the pack.
    expected = []
    first = 0
    for number, (real, packed) in enumerate(zip(lengths, shape.lengths, strict=False)):
        expected += [(first + t if t < real else -1, t, number if t < real else -1) for t in range(packed)]
        first += real
    expected += [(-1, t, -1) for t in range(rows - len(expected))]
    assert list(zip(shape.source, shape.position, shape.sequence, strict=True)) == expected
    parts = [zigzag_rows(shape.lengths, rank, split.context) for rank in range(split.context)]
    assert sorted(np.concatenate(parts)) == list(range(rows))
    assert {len(part) for part in parts} == {rows // split.context}
    # Causal attention costs every rank the same: the sum over its rows of the rows they see.
    assert len({int((shape.position[part] + 1).sum()) for part in parts}) <= 1 or split.context == 1
