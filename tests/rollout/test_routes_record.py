"""One frame per response holds exactly what vLLM would have sent token by token; n > 1 and abort."""

from __future__ import annotations

import asyncio
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_dppo.rollout.serving.engine import ServedEngine
from megatron_dppo.rollout.vllm.core import VllmCore
from megatron_dppo.rollout.vllm.record_frame import HOLD, BadFrame, ResponseRecord
from megatron_dppo.rollout.vllm.sampling import sampling_params
from tests.rollout.conftest import SAMPLING, Served, only_vllm, prompts


def record(tokens: int = 5, columns: int = 4, experts: Any = np.uint8) -> ResponseRecord:
    rng = np.random.default_rng(tokens)
    return ResponseRecord(
        ids=rng.integers(0, 1000, (tokens, columns)).astype(np.int32),
        logp=rng.standard_normal((tokens, columns)).astype(np.float32),
        experts=None if experts is None else rng.integers(0, 200, (tokens + 6, 3, 2)).astype(experts),
    )


@pytest.mark.parametrize("experts", [np.uint8, np.uint16, None])
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_frame_comes_back_as_the_same_record(tokens: int, experts: Any) -> None:
    made = record(tokens, experts=experts)
    read = ResponseRecord.from_frame(made.to_frame())
    np.testing.assert_array_equal(read.ids, made.ids)
    np.testing.assert_array_equal(read.logp, made.logp)
    if experts is None:
        assert read.experts is None
    else:
        assert read.experts is not None
        assert read.experts.dtype == experts
        np.testing.assert_array_equal(read.experts, made.experts)


def test_what_is_no_frame_is_refused() -> None:
    frame = record().to_frame()
    with pytest.raises(BadFrame, match=r"a record is uint8 \[bytes\], got uint8 \(11, 3, 2\)"):
        ResponseRecord.from_frame(record().experts)
    with pytest.raises(BadFrame, match=r"bytes, \d+ came"):
        ResponseRecord.from_frame(frame[:-1])
    with pytest.raises(BadFrame, match="not a record"):
        ResponseRecord.from_frame(np.zeros(100, dtype=np.uint8))
    header = np.frombuffer(struct.pack("<8s6I", b"RECORD\x00\x01", 1, 0, 0, 2**32 - 1, 2**32 - 1, 1), dtype=np.uint8)
    with pytest.raises(BadFrame, match="no such sizes"):
        ResponseRecord.from_frame(header)


def collect(
    engine: ServedEngine[VllmCore], count: int, *, hold: bool, n: int = 1, abort: tuple[int, ...] = ()
) -> list[Any]:
    """vLLM's own final outputs (None where aborted), through the engine's own core."""
    from vllm.inputs.engine import tokens_input

    async def one(index: int, prompt: np.ndarray) -> Any:
        params = sampling_params(replace(SAMPLING, stop_token_ids=(1,)), index)
        params.extra_args = dict(HOLD) if hold else None
        params.n = n
        final = None
        async for output in engine.core.engine.generate(tokens_input(prompt.tolist()), params, f"r{hold}{n}/{index}"):
            final = output
        return final

    async def together() -> list[Any]:
        tasks = [asyncio.ensure_future(one(i, p)) for i, p in enumerate(prompts(count, seed=9))]
        if abort:
            known = engine.core.engine.output_processor.request_states
            while len(known) < count and not any(task.done() for task in tasks):
                await asyncio.sleep(0.001)
            for index in abort:
                tasks[index].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    return engine._loop.run(together())


@only_vllm
@pytest.mark.parametrize("n", [1, 3])
def test_frames_hold_what_vllm_sends_token_by_token(served_mixed: Served, n: int) -> None:
    engine = served_mixed.engine
    assert isinstance(engine, ServedEngine)
    width = 1 + SAMPLING.top_k_logprobs
    for plain, held in zip(collect(engine, 12, hold=False, n=n), collect(engine, 12, hold=True, n=n), strict=True):
        assert len(plain.outputs) == len(held.outputs) == n
        assert plain.finished
        assert held.finished
        for expected, got in zip(plain.outputs, held.outputs, strict=True):
            assert list(got.token_ids) == list(expected.token_ids)
            assert (got.finish_reason, got.stop_reason) == (expected.finish_reason, expected.stop_reason)
            read = ResponseRecord.from_frame(got.routed_experts)
            # Another batch composition moves log-probabilities by float noise, and may swap ids that are tied.
            np.testing.assert_array_equal(read.ids[:, 0], expected.token_ids)
            assert (read.ids == np.reshape(expected.logprobs.token_ids, (-1, width))).mean() > 0.99
            np.testing.assert_allclose(read.logp, np.reshape(expected.logprobs.logprobs, (-1, width)), atol=1e-5)
            np.testing.assert_array_equal(read.experts, expected.routed_experts)
            assert len(got.logprobs.token_ids) == 0, "nothing is sent twice"


@only_vllm
def test_aborted_requests_disturb_nobody(served_mixed: Served) -> None:
    engine = served_mixed.engine
    assert isinstance(engine, ServedEngine)
    whole = collect(engine, 12, hold=True)
    some = collect(engine, 12, hold=True, abort=(0, 5, 11))
    aborted = [index for index, got in enumerate(some) if isinstance(got, asyncio.CancelledError)]
    assert 11 in aborted  # on a busy machine the others may have ended when the last one was known
    assert {0, 5, 11}.issuperset(aborted)
    for index in set(range(12)).difference(aborted):
        same_response(some[index], whole[index])
    again = collect(engine, 12, hold=True)  # under the names of those that were aborted
    for got, expected in zip(again, whole, strict=True):
        same_response(got, expected)


def same_response(got: Any, expected: Any) -> None:
    one, other = (ResponseRecord.from_frame(o.outputs[0].routed_experts) for o in (got, expected))
    assert list(got.outputs[0].token_ids) == list(expected.outputs[0].token_ids)
    np.testing.assert_array_equal(one.ids[:, 0], other.ids[:, 0])
    np.testing.assert_allclose(one.logp, other.logp, atol=1e-5)
    np.testing.assert_array_equal(one.experts, other.experts)


@only_vllm
def test_rays_object_store_hands_routes_over_without_a_copy(served: Served) -> None:
    """Two readers of one object look at the same read-only memory."""
    import ray

    assert served.first.routes is not None
    reference = ray.put(served.first.routes)
    one, other = ray.get(reference), ray.get(reference)
    np.testing.assert_array_equal(one.experts, served.first.routes.experts)
    np.testing.assert_array_equal(one.spans, [[0, 0]])
    assert np.shares_memory(one.experts, other.experts)
    assert not one.experts.flags.writeable
    part = one.between(10, 20)
    assert np.shares_memory(part.experts, one.experts)
