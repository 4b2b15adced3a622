"""Responses that a weight sync cuts: every token is exactly what the weights that sampled it say."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_dppo.batch import RolloutBatch
from megatron_dppo.checkpoint.weight_layout import pack
from megatron_dppo.rollout.engine import GenerationRequest, TransferTerms
from megatron_dppo.rollout.serving.engine import ServedEngine
from megatron_dppo.rollout.serving.sampler import join_parts
from megatron_dppo.rollout.stored import columns_of
from megatron_dppo.rollout.weight_transfer.group import MeetingStore
from tests.batch.test_turns import turn
from tests.distributed import PATIENCE_S
from tests.rollout.conftest import SAMPLING, Served, requests
from tests.rollout.reference import model_with, other_weights
from tests.rollout.spans import check_spans, check_tokens

LONG = replace(SAMPLING, max_tokens=24)


def test_parts_are_joined_under_the_name_of_their_request(served_mixed: Served) -> None:
    """Where every request has one part, one of them was cut before its first token."""
    whole = served_mixed.first.select([0, 1])
    asked = [
        GenerationRequest(request_id=f"a/{b}", prompt_ids=whole.token_ids[: whole.prompt_lengths[b]], seed=b)
        for b in range(2)
    ]
    joined = join_parts(asked, [1, 1], replace(whole, request_ids=("a/0", "a/1~1")))
    assert joined.request_ids == ("a/0", "a/1")
    np.testing.assert_array_equal(joined.token_ids, whole.token_ids)


def test_of_two_parts_the_prompt_is_the_last_ones() -> None:
    parts = [turn([10, 11, 12], [20, 21], routed_as=1), turn([10, 11, 12, 20, 21], [22], routed_as=2)]
    batch = RolloutBatch.concatenate(parts)
    versions = np.repeat([4, 5], [5, 6])
    assert batch.routes is not None
    batch = replace(batch, weight_versions=versions.astype(np.int32), routes=batch.routes.routed_under(versions))
    asked = [GenerationRequest(request_id="a", prompt_ids=np.array([10, 11, 12]), seed=0)]
    joined = join_parts(asked, [2], batch)
    assert joined.routes is not None
    assert joined.token_ids.tolist() == [10, 11, 12, 20, 21, 22]
    assert joined.loss_mask.tolist() == [False] * 3 + [True] * 3
    assert joined.prompt_lengths.tolist() == [3]
    assert joined.weight_versions.tolist() == [5, 5, 5, 4, 4, 5]
    # 12 sampled the first token, and 21 never went through the weights that sampled it.
    assert joined.routes.experts[:, 0].tolist() == [[2, 0], [2, 1], [1, 2], [1, 3], [2, 4], [0, 0]]
    assert joined.routes.weight_versions.tolist() == [5, 5, 4, 4, 5, 5]
    assert joined.routes.valid.tolist() == [True] * 5 + [False]


def test_a_cut_response_goes_on_under_the_new_weights(served_mixed: Served, tmp_path: Path) -> None:
    engine = served_mixed.engine
    assert isinstance(engine, ServedEngine)
    weights = [other_weights(served_mixed.model, seed) for seed in (21, 22)]
    served_mixed.update(old := served_mixed.next_version(), weights[0].items())
    engine.cut = True
    made: list[RolloutBatch] = []
    asked = requests(60, "cut", seed=9)
    work = threading.Thread(
        target=lambda: made.append(engine.generate(asked, LONG, training=True, call="cut")), daemon=True
    )
    try:
        work.start()
        deadline = time.monotonic() + PATIENCE_S
        while engine.alive().ended.get("cut", 0) == 0:  # some have ended, sixteen are under way, the others wait
            assert time.monotonic() < deadline
            time.sleep(0.002)
        served_mixed.update(new := served_mixed.next_version(), weights[1].items())
        work.join(PATIENCE_S)
        assert not work.is_alive()
    finally:
        engine.cut = False
    (batch,) = made
    assert batch.request_ids == tuple(r.request_id for r in asked)

    handle, _ = columns_of(batch, store="none", key="none", layer_groups=None)
    assert set(handle.versions.ravel().tolist()) == {old, new}
    cut = check_spans(batch, LONG)
    assert cut.tolist() == [b for b, (oldest, newest) in enumerate(handle.versions) if oldest < newest]
    # At most as many as are decoded together. Those that had no token yet began again, those at their last one ended.
    assert 1 <= len(cut) <= engine.config.max_num_seqs
    check_tokens(
        batch,
        {
            version: model_with(served_mixed.model, sent, tmp_path / str(version))
            for version, sent in zip((old, new), weights, strict=True)
        },
    )


def test_work_that_comes_late_waits_for_the_sync_that_has_begun(served_mixed: Served, tmp_path: Path) -> None:
    """A fleet that cuts responses sent it before; refused, it would cost the fleet this engine."""
    engine, weights = served_mixed.engine, other_weights(served_mixed.model, seed=23)
    engine.begin_update(version := served_mixed.next_version())
    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(engine.generate, requests(8, "late"), LONG, training=True)
        assert not wait([late], timeout=0.3).done
        for bucket in pack(weights.items(), 1 << 20):
            engine.receive_bucket(version, bucket)
        engine.end_update(version, {})
        batch = late.result(PATIENCE_S)
    assert (batch.weight_versions == version).all()
    check_tokens(batch, {version: model_with(served_mixed.model, weights, tmp_path / "late")})


def test_work_waits_for_a_sync_that_died_to_be_begun_again(served_mixed: Served, tmp_path: Path) -> None:
    """Another engine ended, and nobody got into the communicator with it: this one takes the next attempt."""
    engine, weights = served_mixed.engine, other_weights(served_mixed.model, seed=24)
    engine.begin_update(version := served_mixed.next_version())
    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(engine.generate, requests(8, "again"), LONG, training=True)
        assert not wait([late], timeout=0.3).done
        where = MeetingStore("127.0.0.1").next(2, 1.0)
        with pytest.raises(Exception, match="not all 2 members of a weight broadcast came together"):
            engine.agree(TransferTerms(group=where, first_rank=1, source_rank={0: 0}))
        assert not wait([late], timeout=0.3).done
        engine.begin_update(version)
        for bucket in pack(weights.items(), 1 << 20):
            engine.receive_bucket(version, bucket)
        engine.end_update(version, {})
        batch = late.result(PATIENCE_S)
    assert (batch.weight_versions == version).all()
    check_tokens(batch, {version: model_with(served_mixed.model, weights, tmp_path / "again")})
