"""Routes of a vLLM that prefills in chunks, hits its prefix cache and preempts, against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dppo.batch import RolloutBatch
from megatron_dppo.rollout.engine import GenerationRequest
from megatron_dppo.rollout.serving.engine import ServedEngine
from megatron_dppo.rollout.vllm import core as vllm_core
from megatron_dppo.rollout.vllm import start as vllm_start
from megatron_dppo.rollout.vllm.core import VllmCore
from megatron_dppo.rollout.vllm.start import open_engine
from tests.rollout.conftest import CONFIG, SAMPLING
from tests.rollout.reference import compare_law, compare_routes, load, reference
from tests.tiny import VOCAB_SIZE, tiny_qwen3_moe

SEQUENCES, TOKENS_PER_STEP = 200, 24


class Pressure:
    """What vLLM says of itself, by a stat logger of ours."""

    def __init__(self) -> None:
        self.preempted = 0
        self.cached = 0
        self.largest_step = 0

    def __call__(self, vllm_config: Any, engine_index: int = 0) -> Any:
        from vllm.v1.metrics.loggers import StatLoggerBase

        pressure = self

        class Logger(StatLoggerBase):
            def __init__(self) -> None:
                pass

            def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
                if scheduler_stats is not None:
                    pressure.cached += scheduler_stats.prefix_cache_stats.hits
                if iteration_stats is not None:
                    pressure.preempted += iteration_stats.num_preempted_reqs

            def log_engine_initialized(self) -> None:
                pass

        return Logger()


@pytest.fixture(scope="module")
def pressed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServedEngine[VllmCore], Path, Pressure]]:
    """16 sequences grow from 2 to 3 blocks of a key-value cache that has 16 of them.

    Requests carry no seeds of their own: on a CPU vLLM 0.26 cannot prefill seeded requests in chunks.
    """
    from vllm.v1.engine.async_llm import AsyncLLM

    model = tmp_path_factory.mktemp("pressed")
    tiny_qwen3_moe(model, seed=1, num_hidden_layers=5, mlp_only_layers=[2])
    pressure = Pressure()
    with pytest.MonkeyPatch.context() as patch:
        options, params_of, start = vllm_start.engine_options, vllm_core.sampling_params, AsyncLLM.from_vllm_config
        chunked = {"enable_chunked_prefill": True, "max_num_batched_tokens": TOKENS_PER_STEP}
        patch.setattr(vllm_start, "engine_options", lambda config: options(config) | chunked)

        def unseeded(*args: Any, **kwargs: Any) -> Any:
            params = params_of(*args, **kwargs)
            params.seed = None
            return params

        patch.setattr(vllm_core, "sampling_params", unseeded)

        def watched(config: Any, **kwargs: Any) -> Any:
            return start(config, **kwargs | {"disable_log_stats": False, "stat_loggers": [pressure]})

        patch.setattr(AsyncLLM, "from_vllm_config", watched)
        engine = open_engine(model, CONFIG.model_copy(update={"kv_cache_mib": 1, "max_response_tokens": 40}))
        try:
            yield engine, model, pressure
        finally:
            engine.close()


def long_prompts() -> list[GenerationRequest]:
    """Prompts of 30 to 40 tokens, more than a step holds; groups of four share all or the first block of theirs."""
    rng = np.random.default_rng(5)
    prompts = []
    for index in range(SEQUENCES):
        if index % 4 == 0:
            shared = rng.integers(2, VOCAB_SIZE, 40)
        prompt = shared.copy()
        if index % 4 == 3:
            prompt[33:] = rng.integers(2, VOCAB_SIZE, 7)
        prompts.append(prompt[: rng.integers(34, 41)] if index % 4 > 1 else prompt)
    return [
        GenerationRequest(request_id=f"pressed/{i}/0", prompt_ids=p.astype(np.int32), seed=0)
        for i, p in enumerate(prompts)
    ]


def test_routes_survive_chunks_cache_hits_and_preemption(
    pressed: tuple[ServedEngine[VllmCore], Path, Pressure],
) -> None:
    engine, model, pressure = pressed
    batch: RolloutBatch = engine.generate(long_prompts(), replace(SAMPLING, max_tokens=40), training=True)
    assert len(batch) == SEQUENCES
    assert (batch.prompt_lengths > TOKENS_PER_STEP).all(), "every prompt takes several steps"
    assert pressure.preempted > 20, f"only {pressure.preempted} preemptions: the case is too easy"
    assert pressure.cached > 1000, f"only {pressure.cached} tokens came from the prefix cache: the case is too easy"
    expected = reference(load(model), batch)
    assert compare_law(batch, expected) <= 1e-4
    compared, mismatches, excused = compare_routes(batch, expected)
    assert batch.routes is not None
    assert compared == (len(batch.token_ids) - SEQUENCES) * 4
    assert mismatches == 0
    assert excused <= compared // 1000
    print(
        f"{compared} (token, layer) pairs, {mismatches} mismatches, {excused} near-ties excused; "
        f"{pressure.preempted} preemptions, {pressure.cached} cached tokens"
    )
