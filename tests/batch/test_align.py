from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dppo.batch import AlignedBatch, Columns, RolloutBatch, align
from tests.batch.rollouts import random_batch


def test_hand_made_example() -> None:
    """Two sequences; in the second the sampled token is outside the engine's K for its last token."""
    inf = np.inf
    batch = RolloutBatch(
        token_ids=np.array([5, 6, 7, 3, 9, 4], dtype=np.int32),
        offsets=np.array([0, 3, 6]),
        prompt_lengths=np.array([2, 1], dtype=np.int32),
        loss_mask=np.array([False, False, True, False, True, True]),
        mu_logp=np.array([0, 0, -0.5, 0, -1.0, -3.0], dtype=np.float32),
        topk_ids=np.array([[-1, -1], [-1, -1], [7, 2], [-1, -1], [8, 9], [1, 2]], dtype=np.int32),
        topk_logp=np.array(
            [[-inf, -inf], [-inf, -inf], [-0.5, -1.5], [-inf, -inf], [-0.7, -1.0], [-0.1, -2.9]], dtype=np.float32
        ),
        routes=None,
        request_ids=("0/0/0", "0/1/0"),
        finish_reasons=("stop", "length"),
        weight_versions=np.zeros(6, dtype=np.int32),
    )
    got = align(batch)
    assert got.policy is not None
    assert got.topk is not None
    assert got.input_ids.tolist() == [5, 6, 7, 3, 9, 4]
    # Row 1 (token 6) predicts token 7; row 2 is the last of its sequence and points at itself.
    assert got.policy.target_ids.tolist() == [6, 7, 7, 9, 4, 4]
    assert got.policy.loss_mask.tolist() == [False, True, False, True, True, False]
    np.testing.assert_array_equal(got.policy.mu_logp, np.array([0, -0.5, 0, -1.0, -3.0, 0], dtype=np.float32))
    assert got.topk.ids[1].tolist() == [7, 2, 7]
    assert got.topk.member[1].tolist() == [True, True, False]  # the K hold the sampled token already
    assert got.topk.ids[4].tolist() == [1, 2, 4]
    assert got.topk.member[4].tolist() == [True, True, True]  # K + 1 members
    np.testing.assert_array_equal(got.topk.mu_logp[4], np.array([-0.1, -2.9, -3.0], dtype=np.float32))
    for row in (0, 2, 5):
        assert not got.topk.member[row].any()
        assert (got.topk.mu_logp[row] == -np.inf).all()


lengths = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=5)


@settings(max_examples=60)
@given(shape=lengths, top_k=st.sampled_from([0, 1, 5, 28]), seed=st.integers(0, 1000))
def test_every_sampled_token_is_described_by_the_row_before_it(
    shape: list[tuple[int, int]], top_k: int, seed: int
) -> None:
    batch = random_batch(seed, [p for p, _ in shape], [r for _, r in shape], top_k)
    got = align(batch)
    assert got.policy is not None
    assert got.topk is not None
    assert got.policy.loss_mask.sum() == batch.loss_mask.sum()
    for b in range(len(batch)):
        start, stop = int(batch.offsets[b]), int(batch.offsets[b + 1])
        assert not got.policy.loss_mask[stop - 1]
        for token in range(start, stop):
            sampled = bool(batch.loss_mask[token])
            assert not sampled or token > start
            if token == start:
                continue
            row = token - 1
            assert got.policy.loss_mask[row] == sampled
            assert got.policy.target_ids[row] == batch.token_ids[token]
            assert got.policy.mu_logp[row] == (batch.mu_logp[token] if sampled else 0)
            members = got.topk.ids[row][got.topk.member[row]]
            if not sampled:
                assert len(members) == 0
                continue
            # TopK(mu, K) united with the sampled token: each once, the engine's order kept.
            expected = list(batch.topk_ids[token])
            if batch.token_ids[token] not in expected:
                expected.append(batch.token_ids[token])
            assert members.tolist() == expected
            logps = dict(zip(batch.topk_ids[token].tolist(), batch.topk_logp[token].tolist(), strict=True))
            logps[int(batch.token_ids[token])] = float(batch.mu_logp[token])
            np.testing.assert_array_equal(
                got.topk.mu_logp[row][got.topk.member[row]],
                np.array([logps[int(i)] for i in members], dtype=np.float32),
            )
    assert got.routes is not None
    assert batch.routes is not None
    np.testing.assert_array_equal(got.routes.experts, batch.routes.experts)


@settings(max_examples=30)
@given(shape=lengths, seed=st.integers(0, 1000))
def test_aligning_and_selecting_commute(shape: list[tuple[int, int]], seed: int) -> None:
    batch = random_batch(seed, [p for p, _ in shape], [r for _, r in shape], 3)
    order = np.random.default_rng(seed).permutation(len(batch))
    one, other = align(batch.select(order)), align(batch).select(order)
    assert_same(one, other)
    np.testing.assert_array_equal(one.trained_per_sequence, batch.response_lengths[order])
    assert one.routed_per_sequence.tolist() == (batch.lengths[order] - 1).tolist()


@settings(max_examples=30)
@given(shape=lengths, seed=st.integers(0, 1000), cut=st.integers(0, 5))
def test_parts_of_an_aligned_batch_join_again(shape: list[tuple[int, int]], seed: int, cut: int) -> None:
    whole = align(random_batch(seed, [p for p, _ in shape], [r for _, r in shape], 3))
    numbers = np.arange(len(whole))
    parts = [whole.select(part) for part in (numbers[:cut], numbers[cut:]) if len(part)]
    assert_same(AlignedBatch.concatenate(parts), whole)


def test_only_the_columns_wanted_are_taken() -> None:
    whole = align(random_batch(1, [2, 3], [2, 1], 3))
    got = whole.select(np.array([1]), Columns(policy=False, topk=False, moe_layers=(2, 0)))
    assert got.policy is None
    assert got.topk is None
    assert got.routes is not None
    assert whole.routes is not None
    np.testing.assert_array_equal(got.routes.experts, whole.routes.experts[4:][:, [2, 0]])
    assert whole.select(np.array([0]), Columns(moe_layers=())).routes is None
    with pytest.raises(ValueError, match="policy columns"):
        _ = got.trained_per_sequence


def assert_same(one: AlignedBatch, other: AlignedBatch) -> None:
    np.testing.assert_array_equal(one.input_ids, other.input_ids)
    np.testing.assert_array_equal(one.offsets, other.offsets)
    for part in ("policy", "topk", "routes"):
        for name, value in vars(getattr(one, part)).items():
            np.testing.assert_array_equal(value, getattr(getattr(other, part), name), err_msg=f"{part}.{name}")
    assert one.nbytes == other.nbytes


def test_concatenate_puts_parts_back_together() -> None:
    batch = random_batch(3, [2, 4, 1], [3, 1, 5], 4)
    parts = [batch.select([0]), batch.select([1, 2])]
    joined = RolloutBatch.concatenate(parts)
    np.testing.assert_array_equal(joined.token_ids, batch.token_ids)
    np.testing.assert_array_equal(joined.offsets, batch.offsets)
    assert joined.request_ids == batch.request_ids
    assert joined.routes is not None
    assert batch.routes is not None
    np.testing.assert_array_equal(joined.routes.valid, batch.routes.valid)
    np.testing.assert_array_equal(joined.response_ids(1), batch.response_ids(1))


def test_batches_that_disagree_are_refused() -> None:
    with pytest.raises(ValueError, match="different top-K"):
        RolloutBatch.concatenate([random_batch(0, [1], [2], 2), random_batch(1, [1], [2], 3)])
    with pytest.raises(ValueError, match="some do not"):
        RolloutBatch.concatenate([random_batch(0, [1], [2], 2), random_batch(1, [1], [2], 2, routes=False)])


def test_wrong_shapes_are_named() -> None:
    good = random_batch(0, [1], [2], 2)
    fields = {name: getattr(good, name) for name in good.__dataclass_fields__}
    with pytest.raises(ValueError, match=r"mu_logp has shape \(1,\), expected \(3,\)"):
        RolloutBatch(**{**fields, "mu_logp": good.mu_logp[:1]})
    with pytest.raises(ValueError, match="no empty sequence"):
        RolloutBatch(
            **{
                **fields,
                "offsets": np.array([0, 0, 3]),
                "prompt_lengths": np.array([1, 1]),
                "request_ids": ("a", "b"),
                "finish_reasons": ("stop", "stop"),
            }
        )
    with pytest.raises(ValueError, match=r"routes covers 2 tokens"):
        RolloutBatch(**{**fields, "routes": good.routes.take(np.arange(2)) if good.routes else None})
