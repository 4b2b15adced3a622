"""Sessions before engines that sample: a fleet of two, one of which is killed inside of a turn."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import openai
import pytest

from megatron_dppo.agents.server import SessionServer
from megatron_dppo.agents.sessions import Session, SessionLimits
from megatron_dppo.batch import RolloutBatch
from megatron_dppo.rollout.engine import GenerationRequest, SamplingConfig
from megatron_dppo.rollout.fleet.fleet import EngineFleet
from megatron_dppo.rollout.ray_session import RaySession
from tests.agents.test_exact import check_rows
from tests.distributed import PATIENCE_S
from tests.processes import processes_of
from tests.rollout.conftest import CONFIG, making
from tests.tiny import tiny_qwen3_moe, tiny_tokenizer

SESSIONS, TURNS = 16, 4
LIMITS = SessionLimits(max_turns=TURNS, max_tokens=460, max_response_tokens=40, max_prompt_tokens=420)
SAMPLING = SamplingConfig(top_k_logprobs=3)


@pytest.fixture(scope="module", params=["reference", pytest.param("vllm", marks=pytest.mark.full)])
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineFleet]:
    model = tmp_path_factory.mktemp("model")
    tiny_qwen3_moe(model, seed=1, num_hidden_layers=2)
    sizes = {"max_prompt_tokens": 420, "max_response_tokens": 40, "max_num_batched_tokens": 512}
    config = CONFIG.model_copy(update=sizes | {"engine": request.param, "engines": 2})
    with closing(RaySession.start(namespace=f"agents-{request.param}", object_store_mib=config.object_store_mib)):
        fleet = EngineFleet(making(model, config), config, name="agents")
        try:
            fleet.ready_members()
            yield fleet
        finally:
            fleet.close()


def talk(session: Session, ended: Callable[[], None]) -> None:
    messages: list[dict[str, str]] = []
    with openai.OpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as client:
        for turn in range(TURNS):
            messages.append({"role": "user", "content": f"{session.name}, turn {turn}"})
            reply = client.chat.completions.create(model="m", messages=messages)  # type: ignore[arg-type]
            messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
            ended()


def test_an_engine_that_dies_inside_of_a_turn(fleet: EngineFleet) -> None:
    """Every session goes on from its ids on the other engine: nothing is lost, and nothing is there twice."""
    given: dict[str, RolloutBatch] = {}
    lock, some = threading.Lock(), threading.Semaphore(0)

    def sample(request: GenerationRequest, sampling: SamplingConfig, training: bool) -> RolloutBatch:
        batch = fleet.generate([request], sampling, training=training)
        begins = len(request.prompt_ids) - int(batch.prompt_lengths[0])
        assert begins == max(request.known - 1, 0), "what is known comes again"
        rows = np.maximum(np.arange(begins + len(batch.token_ids)) - begins, 0)
        whole = batch.take(rows, offsets=np.array([0, len(rows)]), prompt_lengths=batch.prompt_lengths + begins)
        whole.token_ids[:begins] = request.prompt_ids[:begins]
        with lock:
            assert given.setdefault(request.request_id, whole) is whole
        return batch

    fleet.take_counts()
    server = SessionServer(sample, tiny_tokenizer())
    try:
        sessions = [
            server.open(f"train/0/{n}/0", sampling=SAMPLING, training=True, seed=lambda turn, n=n: 10 * n + turn,
                        limits=LIMITS)
            for n in range(SESSIONS)
        ]  # fmt: skip
        with ThreadPoolExecutor(SESSIONS) as threads:
            talks = [threads.submit(talk, session, some.release) for session in sessions]
            for _ in range(SESSIONS):
                assert some.acquire(timeout=PATIENCE_S)
            replica = fleet._dispatcher._replicas[0]
            deadline = time.monotonic() + PATIENCE_S
            while not replica.running:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            os.kill(processes_of(replica.engine)[0], signal.SIGKILL)
            for one in talks:
                one.result(PATIENCE_S)
        records = [session.finish() for session in sessions]
    finally:
        server.close()
    counts = fleet.take_counts()
    assert counts["rollout/engine_failures"] == 1
    assert counts["rollout/requeued_sequences"] > 0
    assert len(given) == SESSIONS * TURNS
    for session, record in zip(sessions, records, strict=True):
        assert (record.error, record.refused, record.cut) == (None, 0, "")
        assert [turn.number for turn in record.turns] == list(range(TURNS))
        (branch,) = record.branches
        pieces = {turn.number: [given[f"{session.name}/{turn.number}"]] for turn in record.turns}
        check_rows(branch, list(record.turns), pieces)
        assert branch.routes is not None
        assert branch.routes.valid[:-1].all()
