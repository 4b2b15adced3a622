"""What the engine promises beside the numbers: seeds, refusals, and a gate that a broken sync shuts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_dppo.batch import align
from megatron_dppo.checkpoint.weight_layout import Bucket, pack
from megatron_dppo.errors import UserError
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.engine import EngineClosed, GenerationRequest, GenerationTimeout, SamplingConfig
from megatron_dppo.rollout.fleet.store import RolloutSource
from megatron_dppo.rollout.model_facts import ModelFacts
from megatron_dppo.rollout.serving.engine import ServedEngine
from megatron_dppo.rollout.start import open_engine
from megatron_dppo.rollout.weight_transfer.manifest import IncompleteSync
from tests.batch.test_align import assert_same
from tests.rollout.conftest import KINDS, SAMPLING, Served, only_vllm, requests
from tests.rollout.reference import compare_law, model_with, other_weights, reference


def test_a_seed_gives_the_same_tokens_in_any_company(served: Served) -> None:
    asked = requests(12, "seeds")
    together = served.engine.generate(asked, SAMPLING, training=True)
    again = served.engine.generate(asked[::-1], SAMPLING, training=True)
    alone = served.engine.generate(asked[5:6], SAMPLING, training=True)
    for b in range(12):
        np.testing.assert_array_equal(together.response_ids(b), again.response_ids(11 - b))
    np.testing.assert_array_equal(together.response_ids(5), alone.response_ids(0))
    other = served.engine.generate([replace(r, seed=r.seed + 1) for r in asked], SAMPLING, training=True)
    assert any(not np.array_equal(together.response_ids(b), other.response_ids(b)) for b in range(12))


def test_the_order_and_identity_of_requests_are_kept(served: Served) -> None:
    asked = requests(15, "order")
    batch = served.engine.generate(asked, SAMPLING, training=True)
    assert batch.request_ids == tuple(r.request_id for r in asked)
    for b, request in enumerate(asked):
        prompt = batch.token_ids[batch.offsets[b] : batch.offsets[b] + batch.prompt_lengths[b]]
        np.testing.assert_array_equal(prompt, request.prompt_ids)
    assert (batch.loss_mask.sum(), len(batch)) == (batch.response_lengths.sum(), 15)


def test_evaluation_may_sample_otherwise_and_training_may_not(served: Served) -> None:
    asked = requests(4, "evaluation")
    greedy = replace(SAMPLING, temperature=0.0, top_k_logprobs=0)
    one = served.engine.generate(asked, greedy, training=False)
    two = served.engine.generate([replace(r, seed=r.seed + 7) for r in asked], greedy, training=False)
    np.testing.assert_array_equal(one.token_ids, two.token_ids)
    assert one.routes is None
    assert one.top_k == 0
    served.engine.generate(asked, replace(SAMPLING, top_p=0.9, temperature=0.7), training=False)
    with pytest.raises(UserError, match=r"top_p=0.9 changes the sampling distribution"):
        served.engine.generate(asked, replace(SAMPLING, top_p=0.9), training=True)
    with pytest.raises(UserError, match="greedy draw"):
        served.engine.generate(asked, greedy, training=True)


def test_bad_requests_are_refused_by_name(served: Served) -> None:
    def asking(request_id: str, length: int, drawn: SamplingConfig = SAMPLING) -> None:
        prompt = np.full(length, 5, dtype=np.int32)
        served.engine.generate(
            [GenerationRequest(request_id=request_id, prompt_ids=prompt, seed=0)], drawn, training=True
        )

    with pytest.raises(UserError, match=r"request 0/0/0: the prompt has 41 tokens, rollout.max_prompt_tokens"):
        asking("0/0/0", 41)
    with pytest.raises(UserError, match="the prompt has 0 tokens"):
        asking("0/0/0", 0)
    with pytest.raises(UserError, match="exceed rollout"):
        asking("0/0/0", 30, replace(SAMPLING, max_tokens=60))
    with pytest.raises(UserError, match="at least one token"):
        asking("0/0/0", 3, replace(SAMPLING, max_tokens=0))
    with pytest.raises(UserError, match="same request_id twice"):
        served.engine.generate(requests(1, "twin") * 2, SAMPLING, training=True)
    with pytest.raises(UserError, match="without requests"):
        served.engine.generate([], SAMPLING, training=True)


def test_ranks_pull_just_the_sequences_they_want(served: Served) -> None:
    engine = served.fleet
    assert engine is not None
    asked = requests(20, "pull")
    handle = engine.generate_stored(asked, SAMPLING)
    source = RolloutSource(handle)
    expected = source.rows(np.arange(20))
    again = align(engine.generate(asked, SAMPLING, training=True))  # the same requests give the same answers
    np.testing.assert_array_equal(expected.input_ids, again.input_ids)
    assert expected.policy is not None
    assert again.policy is not None
    np.testing.assert_allclose(expected.policy.mu_logp, again.policy.mu_logp, atol=1e-5)
    assert handle.bounds.tolist() == [0, 6, 13, 20]  # up to 7 sequences, and those of one prompt (6 and 7) together
    assert handle.layer_groups == ((0, 1, 2, 3),)
    np.testing.assert_array_equal(handle.lengths, expected.lengths)
    assert handle.request_ids == tuple(request.request_id for request in asked)
    for chosen in ([19, 0, 8], [3], list(range(6, 15)), [13, 7, 7]):
        assert_same(source.rows(np.array(chosen)), expected.select(np.array(chosen)))
    for mine, theirs in zip(source.token_ids(), np.split(expected.input_ids, expected.offsets[1:-1]), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_array_equal(source.trained, expected.trained_per_sequence)
    np.testing.assert_array_equal(source.routed, expected.routed_per_sequence)
    with pytest.raises(IndexError):
        source.rows(np.array([20]))
    engine.release(handle)
    with pytest.raises(Exception, match="were released"):
        source.rows(np.array([0]))


def test_a_sync_that_dies_shuts_the_gate_until_a_full_one(served: Served, tmp_path: Path) -> None:
    """Faults at the source, in names and in shapes; each leaves no garbage behind once a sync succeeds."""
    weights = other_weights(served.model, seed=11)
    names = list(weights)

    def dying() -> Iterator[tuple[str, torch.Tensor]]:
        for i, item in enumerate(weights.items()):
            if i == len(weights) // 2:
                raise ConnectionError("the exporting rank went away")
            yield item

    faults = {
        "the exporting rank went away": (ConnectionError, dying()),
        "1 tensors did not come, first": (IncompleteSync, ((n, weights[n]) for n in names[:-1])),
        "came twice": (IncompleteSync, ((n, weights[n]) for n in [*names[:3], names[0], *names[3:]])),
        "is not a tensor of": (IncompleteSync, [*weights.items(), ("model.extra.weight", torch.zeros(2))]),
        "has shape": (
            IncompleteSync,
            ((n, w.t().contiguous() if "q_proj" in n else w) for n, w in weights.items()),
        ),
    }
    for message, (kind, source) in faults.items():
        version = served.next_version()
        with pytest.raises(kind, match=message):
            served.update(version, source)
        with pytest.raises(EngineClosed, match=f"refuses to generate: the sync to weight version {version} died"):
            served.engine.generate(requests(2, f"shut-{version}"), SAMPLING, training=True)
        assert served.engine.weight_version < version
    served.update(served.next_version(), weights.items())
    batch = served.engine.generate(requests(16, "reopened"), SAMPLING, training=True)
    assert compare_law(batch, reference(model_with(served.model, weights, tmp_path / "w"), batch)) <= 1e-4
    assert (batch.weight_versions == served.version).all()


def load_buckets(engine: ServedEngine[Any], version: int, buckets: Sequence[Bucket]) -> None:
    engine.begin_update(version)
    for bucket in buckets:
        engine.receive_bucket(version, bucket)
    engine.end_update(version, {})


def test_an_error_inside_the_core_shuts_the_gate_too(served_mixed: Served, tmp_path: Path) -> None:
    """A bucket whose payload ends early: the worker raises half-way through a session."""
    engine = served_mixed.engine
    assert isinstance(engine, ServedEngine)
    weights = other_weights(served_mixed.model, seed=12)
    whole = list(pack(weights.items(), 1 << 16))
    assert len(whole) > 4
    version = served_mixed.next_version()
    cut = Bucket(whole[2].slots, whole[2].payload[:100])
    with pytest.raises(Exception, match=r"weight bucket|slice|size|shape|view"):
        load_buckets(engine, version, [*whole[:2], cut, *whole[3:]])
    with pytest.raises(EngineClosed, match="died"):
        engine.generate(requests(2, "shut"), SAMPLING, training=True)
    load_buckets(engine, served_mixed.next_version(), whole)
    batch = engine.generate(requests(16, "open"), SAMPLING, training=True)
    assert compare_law(batch, reference(model_with(served_mixed.model, weights, tmp_path / "w"), batch)) <= 1e-4


@only_vllm
@pytest.mark.parametrize(
    ("left_out", "layer"),
    [
        ("model.layers.1.mlp.experts.3.up_proj.weight", r"model\.layers\.1\.mlp\.experts\S* \(RoutedExperts\): \d+ of"),
        ("model.layers.0.self_attn.k_proj.weight", r"self_attn\.qkv_proj \(QKVParallelLinear\): \d+ of"),
        ("model.layers.3.mlp.gate.weight", r"model\.layers\.3\.mlp\.gate \(\w+\): 0 of"),
        ("model.embed_tokens.weight", r"model\.embed_tokens \(VocabParallelEmbedding\): 0 of \d+ .*; lm_head"),
    ],
)
def test_a_layer_without_all_of_its_weights_is_refused_by_name(
    served_mixed: Served, monkeypatch: pytest.MonkeyPatch, left_out: str, layer: str
) -> None:
    """vLLM would keep its old weights, or take what lies in memory. What came is not compared with the checkpoint's
    names, as at the first sync of random weights. Padding of the vocabulary is not missed."""
    engine = served_mixed.engine
    assert isinstance(engine, ServedEngine)
    weights = other_weights(served_mixed.model, seed=13)
    monkeypatch.setattr(engine._manifest, "end", lambda: None)
    some = list(pack(((name, tensor) for name, tensor in weights.items() if name != left_out), 1 << 16))
    with pytest.raises(IncompleteSync, match=layer):
        load_buckets(engine, served_mixed.next_version(), some)
    with pytest.raises(EngineClosed, match="died"):
        engine.generate(requests(2, "shut"), SAMPLING, training=True)
    load_buckets(engine, served_mixed.next_version(), list(pack(weights.items(), 1 << 16)))
    assert len(engine.generate(requests(2, "open"), SAMPLING, training=True)) == 2


def test_generation_pauses_and_resumes(served_mixed: Served) -> None:
    import threading

    engine = served_mixed.engine
    expected = engine.generate(requests(8, "run"), SAMPLING, training=True)
    engine.pause()
    answers = []
    worker = threading.Thread(
        target=lambda: answers.append(engine.generate(requests(8, "paused"), SAMPLING, training=True)), daemon=True
    )
    worker.start()
    worker.join(1.0)
    assert worker.is_alive()
    engine.resume()
    worker.join(300)
    assert not worker.is_alive()
    np.testing.assert_array_equal(answers[0].token_ids, expected.token_ids)


def test_a_call_that_takes_too_long_is_given_up_and_leaves_the_engine_usable(served_mixed: Served) -> None:
    engine = served_mixed.engine
    assert isinstance(engine, ServedEngine)
    kept = engine._sampler._timeout
    engine.pause()
    try:
        engine._sampler._timeout = 0.2
        with pytest.raises(GenerationTimeout, match=r"late/\d/0 had not ended after rollout.request_timeout_s=0.2"):
            engine.generate(requests(8, "late"), SAMPLING, training=True)
    finally:
        engine._sampler._timeout = kept
        engine.resume()
    assert len(engine.generate(requests(8, "late"), SAMPLING, training=True)) == 8


def test_sleep_is_harmless_on_a_cpu(served_mixed: Served) -> None:
    served_mixed.engine.sleep()
    served_mixed.engine.wake("weights")
    with pytest.raises(EngineClosed, match="woke without weights"):
        served_mixed.engine.generate(requests(1, "asleep"), SAMPLING, training=True)
    served_mixed.update(served_mixed.next_version(), other_weights(served_mixed.model, 1).items())
    served_mixed.engine.wake("kv_cache")
    assert len(served_mixed.engine.generate(requests(1, "awake"), SAMPLING, training=True)) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_folders_that_are_no_model_are_named(kind: str, tmp_path: Path) -> None:
    config = RolloutConfig(engine=kind)
    with pytest.raises(UserError, match=r"config.json: no such file"):
        open_engine(tmp_path, config)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        ModelFacts.read(tmp_path, router_replay=True)
    (tmp_path / "config.json").write_text('{"vocab_size": 10}')
    if kind == "vllm":  # transformers' own model says what routes
        with pytest.raises(UserError, match="model_type None is not supported"):
            open_engine(tmp_path, config)
    with pytest.raises(UserError, match="names no eos_token_id"):
        open_engine(tmp_path, config.model_copy(update={"router_replay": False}))
