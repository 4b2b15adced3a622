"""Turns of an episode joined into one sequence, against an expectation written out token by token."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_dppo.batch import RolloutBatch, align, join_turns
from megatron_dppo.router_replay.routes import Routes


def turn(prompt: list[int], response: list[int], *, version: int = 0, routed_as: int = 0, routes: bool = True):
    """A batch of one sequence; token t's route is (routed_as, t), its log mu -(t + 1) / 10, its top-2 [token, 99]."""
    ids = np.array(prompt + response, dtype=np.int32)
    n, p = len(ids), len(prompt)
    sampled = np.arange(n) >= p
    experts = np.stack([np.full(n, routed_as), np.arange(n)], axis=1).astype(np.uint8)[:, None, :]
    experts[-1] = 0
    return RolloutBatch(
        token_ids=ids,
        offsets=np.array([0, n]),
        prompt_lengths=np.array([p], dtype=np.int32),
        loss_mask=sampled,
        mu_logp=np.where(sampled, -(np.arange(n) + 1) / 10, 0).astype(np.float32),
        topk_ids=np.where(sampled[:, None], np.stack([ids, np.full(n, 99)], 1), -1).astype(np.int32),
        topk_logp=np.where(sampled[:, None], -1.0, -np.inf).astype(np.float32) * np.ones((1, 2), np.float32),
        routes=Routes(experts, np.arange(n) < n - 1, 32) if routes else None,
        request_ids=("r",),
        finish_reasons=("stop",),
        weight_versions=np.full(n, version, dtype=np.int32),
    )


def test_three_turns_token_by_token():
    first = turn([10, 11], [20, 21], routed_as=1, version=4)
    second = turn([10, 11, 20, 21, 30], [22], routed_as=2, version=4)
    third = turn([10, 11, 20, 21, 30, 22, 31, 32], [23, 24], routed_as=3, version=5)
    parts = [first, second.beyond([4]), third.beyond([6])]
    assert [len(part.token_ids) for part in parts] == [4, 3, 5]
    batch = join_turns(parts, request_id="train/0/7/1", finish_reason="stop")
    #          prompt   turn 1   said  turn 2  said     turn 3
    tokens = [10, 11, 20, 21, 30, 22, 31, 32, 23, 24]
    mask = [False, False, True, True, False, True, False, False, True, True]
    # Turn 1 routed its prompt and its first token; turn 2's prefill routed 21 and 30; turn 3's routed 22, 31, 32, and
    # its own decode 23. Nobody fed 24 to the model.
    routed_as = [1, 1, 1, 2, 2, 3, 3, 3, 3, 0]
    np.testing.assert_array_equal(batch.token_ids, tokens)
    np.testing.assert_array_equal(batch.loss_mask, mask)
    np.testing.assert_array_equal(batch.routes.experts[:, 0, 0], routed_as)
    np.testing.assert_array_equal(batch.routes.experts[:, 0, 1], [*range(9), 0])
    np.testing.assert_array_equal(batch.routes.valid, [True] * 9 + [False])
    np.testing.assert_allclose(batch.mu_logp, [0, 0, -0.3, -0.4, 0, -0.6, 0, 0, -0.9, -1.0])
    np.testing.assert_array_equal(batch.topk_ids[:, 0], np.where(mask, tokens, -1))
    np.testing.assert_array_equal(np.isfinite(batch.topk_logp[:, 0]), mask)
    np.testing.assert_array_equal(batch.weight_versions, [4] * 6 + [5] * 4)
    assert (batch.request_ids, batch.finish_reasons) == (("train/0/7/1",), ("stop",))
    assert batch.prompt_lengths.tolist() == [2]
    assert batch.sampled_per_sequence.tolist() == [5]
    # What is trained on: the rows that predict sampled tokens, and no others.
    aligned = align(batch)
    assert aligned.policy.loss_mask.tolist() == [*mask[1:], False]
    assert aligned.policy.target_ids[aligned.policy.loss_mask].tolist() == [20, 21, 22, 23, 24]


def test_one_turn_is_left_as_it_was():
    only = turn([1, 2], [3, 4], routed_as=1, version=2)
    batch = join_turns([only], request_id="r", finish_reason="stop")
    for name in ("token_ids", "loss_mask", "mu_logp", "topk_ids", "topk_logp", "weight_versions", "prompt_lengths"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(only, name), err_msg=name)
    np.testing.assert_array_equal(batch.routes.experts, only.routes.experts)
    assert join_turns([turn([1], [2], routes=False)], request_id="r", finish_reason="stop").routes is None


def test_a_turn_that_does_not_begin_with_the_last_one_is_refused():
    first, second = turn([10, 11], [20, 21]), turn([10, 11, 20, 99, 30], [22, 23, 24])
    for wrong in (second.beyond([4]), turn([10, 11, 20, 21, 30], [22])):
        with pytest.raises(ValueError, match=r"r: turn 1 does not begin with the last token of the turn before it"):
            join_turns([first, wrong], request_id="r", finish_reason="stop")
    plain = turn([10, 11, 20, 21, 30], [22], routes=False).beyond([4])
    with pytest.raises(ValueError, match="r: some turns carry routes and some do not"):
        join_turns([first, plain], request_id="r", finish_reason="stop")


def test_what_is_known_is_left_out_of_each_sequence():
    first, second = turn([10, 11], [20, 21], routed_as=1, version=4), turn([7, 8, 9], [6], routed_as=2, version=5)
    batch = RolloutBatch.concatenate([first, second])
    left = batch.beyond([2, 0])
    assert left.token_ids.tolist() == [11, 20, 21, 7, 8, 9, 6]
    assert (left.offsets.tolist(), left.prompt_lengths.tolist()) == ([0, 3, 7], [1, 3])
    assert left.loss_mask.tolist() == [False, True, True, False, False, False, True]
    assert left.routes.experts[:, 0].tolist() == [[1, 1], [1, 2], [0, 0], [2, 0], [2, 1], [2, 2], [0, 0]]
    assert left.routes.valid.tolist() == [True, True, False, True, True, True, False]
    assert left.weight_versions.tolist() == [4] * 3 + [5] * 4
    assert batch.beyond([0, 0]) is batch
    assert batch.beyond([1, 1]).token_ids.tolist() == batch.token_ids.tolist()
    with pytest.raises(ValueError, match=r"\[3, 0\] tokens are known of prompts of \[2, 3\]"):
        batch.beyond([3, 0])
