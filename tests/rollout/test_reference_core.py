"""What the reference engine's thread does with calls side by side, calls that are given up, and an error in a step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_dppo.rollout.engine import EngineClosed, EngineDead
from megatron_dppo.rollout.reference.core import ReferenceEngine
from tests.rollout.conftest import CONFIG, SAMPLING, requests
from tests.tiny import tiny_qwen3_moe


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[ReferenceEngine]:
    tiny_qwen3_moe(tmp_path, seed=1, num_hidden_layers=2)
    made = ReferenceEngine(tmp_path, CONFIG)
    try:
        yield made
    finally:
        made.close()


def test_calls_side_by_side_get_their_own_answers(engine: ReferenceEngine) -> None:
    """Other lengths, temperatures and records in one wave."""
    samplings = [
        SAMPLING,
        replace(SAMPLING, max_tokens=3, top_k_logprobs=0),
        replace(SAMPLING, temperature=0.5, top_k_logprobs=2),
        replace(SAMPLING, temperature=0.0, max_tokens=5),
    ]
    asked = [requests(5, f"call-{number}", seed=number) for number in range(4)]
    alone = [engine.generate(a, s, training=False) for a, s in zip(asked, samplings, strict=True)]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda a, s: engine.generate(a, s, training=False), asked, samplings))
    for one, other, sampling in zip(alone, together, samplings, strict=True):
        assert other.top_k == sampling.top_k_logprobs
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_allclose(one.mu_logp, other.mu_logp, atol=1e-5)


def test_a_call_that_is_given_up_leaves_nothing(engine: ReferenceEngine) -> None:
    engine.pause()
    raised: list[BaseException] = []

    def call() -> None:
        try:
            engine.generate(requests(20, "given up"), SAMPLING, training=True, call="mine")
        except BaseException as error:
            raised.append(error)

    waiting = threading.Thread(target=call, daemon=True)
    waiting.start()
    while "mine" not in engine.alive().ended:
        pass
    engine.abandon("mine")
    waiting.join(300)
    assert [type(error) for error in raised] == [CancelledError]
    engine.resume()
    assert len(engine.generate(requests(20, "given up"), SAMPLING, training=True)) == 20
    assert engine.alive().ended == {}


def test_an_error_in_a_step_ends_the_engine(engine: ReferenceEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for vLLM's core: who waits hears of it, and so does whoever asks later."""

    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no memory left")

    monkeypatch.setattr(engine.core._model, "forward", broken)
    with pytest.raises(EngineDead, match="thread ended: RuntimeError: no memory left"):
        engine.generate(requests(20, "lost"), SAMPLING, training=True)
    with pytest.raises(EngineDead, match="no memory left"):
        engine.alive()
    with pytest.raises(EngineDead, match="no memory left"):
        engine.generate(requests(1, "later"), SAMPLING, training=True)
    engine.close()
    with pytest.raises(EngineClosed):
        engine.generate(requests(1, "closed"), SAMPLING, training=True)
