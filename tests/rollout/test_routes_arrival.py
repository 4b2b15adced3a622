"""What arrives from vLLM, with its own output classes, and every way in which a record can be missing or wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron_dppo.rollout.engine import GenerationRequest, MalformedOutput
from megatron_dppo.rollout.serving.core import Answer
from megatron_dppo.rollout.serving.sampler import to_batch
from megatron_dppo.rollout.vllm.core import answer_of
from megatron_dppo.rollout.vllm.record_frame import ResponseRecord
from megatron_dppo.router_replay.record import RouteError, RouteSchema

SCHEMA = RouteSchema(hidden_layers=3, moe_layers=(0, 2), num_experts=8, topk=2)
PROMPTS, TOKENS, K = ([3, 4, 5], [6]), ([7, 8], [9, 10, 11]), 4


def requests() -> list[GenerationRequest]:
    return [
        GenerationRequest(request_id=f"0/{i}/0", prompt_ids=np.array(p, dtype=np.int32), seed=i)
        for i, p in enumerate(PROMPTS)
    ]


def record(prompt: list[int], tokens: list[int]) -> ResponseRecord:
    rng = np.random.default_rng(len(tokens))
    ids = np.concatenate([np.array(tokens)[:, None], rng.integers(0, 50, (len(tokens), K))], axis=1)
    experts = np.zeros((len(prompt) + len(tokens) - 1, 3, 2), dtype=np.uint8)
    experts[:, [0, 2]] = np.argsort(rng.random((len(experts), 2, 8)), axis=-1)[..., :2]
    return ResponseRecord(ids.astype(np.int32), -np.sort(rng.random(ids.shape)).astype(np.float32), experts)


def answers(frames: list[Any]) -> list[Answer]:
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput, RequestOutput

    return [
        answer_of(
            RequestOutput(
                request_id=request.request_id,
                prompt=None,
                prompt_token_ids=prompt,
                prompt_logprobs=None,
                outputs=[
                    CompletionOutput(
                        index=0,
                        text="",
                        token_ids=tokens,
                        cumulative_logprob=0.0,
                        logprobs=FlatLogprobs(),
                        routed_experts=frame,
                        finish_reason="length",
                    )
                ],
                finished=True,
            )
        )
        for request, prompt, tokens, frame in zip(requests(), PROMPTS, TOKENS, frames, strict=True)
    ]


def convert(records: list[ResponseRecord | None]) -> Any:
    frames = [None if r is None else r.to_frame() for r in records]
    return to_batch(requests(), answers(frames), recorded=K, top_k=K, schema=SCHEMA, weight_versions=[6, 6])


def honest() -> list[ResponseRecord]:
    return [record(p, t) for p, t in zip(PROMPTS, TOKENS, strict=True)]


def test_a_whole_record_becomes_a_batch() -> None:
    made = honest()
    batch = convert(made)
    assert batch.token_ids.tolist() == [3, 4, 5, 7, 8, 6, 9, 10, 11]
    assert batch.routes.valid.tolist() == [True] * 4 + [False] + [True] * 3 + [False]
    np.testing.assert_array_equal(batch.routes.experts[:4], made[0].experts[:, [0, 2]])
    np.testing.assert_array_equal(batch.routes.experts[5:8], made[1].experts[:, [0, 2]])
    assert batch.routes.spans.tolist() == [[0, 6]]
    np.testing.assert_array_equal(batch.mu_logp[batch.loss_mask], np.concatenate([r.logp[:, 0] for r in made]))
    np.testing.assert_array_equal(batch.topk_ids[batch.loss_mask], np.concatenate([r.ids[:, 1:] for r in made]))


def with_experts(experts: Any) -> list[ResponseRecord | None]:
    first, second = honest()
    return [first, ResponseRecord(second.ids, second.logp, experts(second.experts.copy()))]


def changed(at: Any, value: Any) -> Any:
    def change(experts: np.ndarray) -> np.ndarray:
        experts[at] = value
        return experts

    return change


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (lambda e: None, "0/1/0: the engine returned no routes"),
        (lambda e: e[:-1], r"0/1/0: routes have shape \(2, 3, 2\), expected \(3, 3, 2\)"),
        (lambda e: np.concatenate([e, e[-1:]]), r"0/1/0: routes have shape \(4, 3, 2\)"),
        (lambda e: e[:, :2], r"0/1/0: routes have shape \(3, 2, 2\)"),
        (lambda e: e[:, :, :1], r"0/1/0: routes have shape \(3, 3, 1\)"),
        (changed((1, 2, 0), 8), "0/1/0: token 1 went to expert 8 in layer 2, the model has 8"),
        (changed((2, 0), 5), r"0/1/0: a token has one expert twice in layer 0: \[5, 5\]"),
        (changed(np.s_[:, 2], 0), "0/1/0: no routes for 3 .* first in layer 2"),
        (changed(np.s_[1], 0), "0/1/0: no routes for 2 .* first in layer 0"),
        (changed((1, 1, 0), 3), "0/1/0: layer 1 routed tokens although the model's layer pattern calls it dense"),
    ],
)
def test_wrong_routes_are_refused_by_request_and_layer(experts: Any, message: str) -> None:
    with pytest.raises(RouteError, match=message):
        convert(with_experts(experts))


def test_records_that_are_missing_or_of_other_tokens_are_refused() -> None:
    first, second = honest()
    with pytest.raises(MalformedOutput, match="0/1/0: the engine answered 3 tokens without a record of them"):
        convert([first, None])
    cut = ResponseRecord(second.ids[:2], second.logp[:2], second.experts)
    with pytest.raises(MalformedOutput, match=r"0/1/0: 3 tokens with log-probabilities \(2, 5\), expected 5 for each"):
        convert([first, cut])
    narrow = ResponseRecord(second.ids[:, :3], second.logp[:, :3], second.experts)
    with pytest.raises(MalformedOutput, match=r"log-probabilities \(3, 3\), expected 5"):
        convert([first, narrow])
    with pytest.raises(MalformedOutput, match="do not belong to the tokens"):
        convert([first, ResponseRecord(second.ids[::-1].copy(), second.logp, second.experts)])
    with pytest.raises(MalformedOutput, match="0/0/0: a record is uint8"):
        to_batch(requests(), answers([first.experts, None]), recorded=K, top_k=K, schema=SCHEMA, weight_versions=[0, 0])
    swapped = answers([first.to_frame(), second.to_frame()])[::-1]
    with pytest.raises(MalformedOutput, match="asked for 0/0/0, the engine answered 0/1/0"):
        to_batch(requests(), swapped, recorded=K, top_k=K, schema=SCHEMA, weight_versions=[0, 0])


def test_routes_of_a_dense_model_are_dropped_with_none_recorded() -> None:
    records = [ResponseRecord(r.ids, r.logp, None) for r in honest()]
    frames = [r.to_frame() for r in records]
    batch = to_batch(requests(), answers(frames), recorded=K, top_k=K, schema=None, weight_versions=[0, 0])
    assert batch.routes is None
