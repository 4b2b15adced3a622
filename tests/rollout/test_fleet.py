"""Two engines as one: work is spread, results outlive their engine, and what one loses the other does."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import pytest
import ray
import torch

from megatron_dppo.rollout.errors import EngineClosed, EnginesFailed
from megatron_dppo.rollout.fleet import EngineFleet
from megatron_dppo.rollout.protocol import GenerationRequest
from megatron_dppo.rollout.ray_engine import RayRolloutEngine
from megatron_dppo.rollout.ray_session import RaySession
from megatron_dppo.rollout.stored import RolloutHandle, RolloutSource
from megatron_dppo.rollout.weight_transfer.bucket import pack
from tests.rollout.conftest import CONFIG, LAW
from tests.rollout.reference import other_weights
from tests.tiny import VOCAB_SIZE, tiny_qwen3_moe

GROUPS, SAMPLES = 24, 4
FLEET = CONFIG.model_copy(
    update={
        "engines": 2,
        "sequences_per_object": 8,
        "stall_timeout_s": 6.0,
        "max_engine_failures": 2,
        "max_tokens_in_flight": 8 * 64 * 3,  # three pieces of work at once
    }
)
LONG = replace(LAW, max_tokens=24, top_k_logprobs=4)


def groups(name: str, count: int = GROUPS, seed: int = 0) -> list[GenerationRequest]:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(2, VOCAB_SIZE, rng.integers(4, 40)).astype(np.int32) for _ in range(count)]
    return [
        GenerationRequest(request_id=f"{name}/{g}/{s}", prompt_ids=prompt, seed=100 * g + s)
        for g, prompt in enumerate(prompts)
        for s in range(SAMPLES)
    ]


def send(engine: RayRolloutEngine, version: int, weights: dict[str, torch.Tensor]) -> None:
    engine.call("begin_update", version)
    for bucket in pack(weights.items(), 1 << 20):
        engine.call("receive_bucket", version, bucket)
    engine.call("end_update", version)


def answers(handle: RolloutHandle) -> dict[str, list[int]]:
    return dict(zip(handle.request_ids, (ids.tolist() for ids in RolloutSource(handle).token_ids()), strict=True))


@dataclass
class Fleet:
    fleet: EngineFleet
    weights: dict[str, torch.Tensor]

    def rolled_out(self, name: str, disturb: Callable[[], None] | None = None) -> RolloutHandle:
        """A rollout of all groups, disturbed once it is under way. New engines get the current weights meanwhile."""
        asked = groups(name)
        with ThreadPoolExecutor(1) as threads:
            found: Future[RolloutHandle] = threads.submit(self.fleet.generate_refs, asked, LONG)
            if disturb is not None:
                while sum(len(seat.running) for seat in self.fleet._dispatch._seats) < 4:
                    time.sleep(0.005)
                disturb()
            while not found.done():
                self.refill()
                time.sleep(0.1)
        handle = found.result()
        assert handle.request_ids == tuple(r.request_id for r in asked)  # each once, in order
        return handle

    def refill(self) -> None:
        for member in self.fleet.members_behind():
            send(member, 1, self.weights)
            self.fleet.synced(1, [member], {})

    def whole(self) -> list[RayRolloutEngine]:
        """Both engines, once they are up with the current weights."""
        deadline = time.monotonic() + 120
        while len(self.fleet.members) < 2 or self.fleet.members_behind():
            self.refill()
            assert time.monotonic() < deadline, "no engine took the seat"
            time.sleep(0.1)
        return self.fleet.members


@pytest.fixture(scope="module")
def two(ray_session: RaySession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    model = tmp_path_factory.mktemp("fleet")
    tiny_qwen3_moe(model, seed=1, num_hidden_layers=1)
    fleet = EngineFleet(model, FLEET, name="two")
    try:
        weights = other_weights(model, seed=5)
        members = fleet.members_to_sync(1)
        assert len(members) == 2
        for member in members:
            send(member, 1, weights)
        fleet.synced(1, members, {})
        yield Fleet(fleet, weights)
    finally:
        fleet.close()
        with pytest.raises((EngineClosed, EnginesFailed)):
            fleet.generate(groups("after the end"), LONG, training=True)


def test_engines_that_die_hang_or_answer_nonsense_lose_no_request_and_double_none(two: Fleet) -> None:
    fleet = two.fleet
    expected = answers(first := two.rolled_out("a"))
    assert (first.versions == 1).all()
    fleet.take_counts()
    # Enough of them: whole groups, in the order asked for, and the rest is counted.
    enough = fleet.generate_refs(asked := groups("a few"), LONG, enough=GROUPS - 5)
    names = [r.request_id for r in asked]
    places = [names.index(request_id) for request_id in enough.request_ids]
    assert places == sorted(set(places))
    assert len(places) == (GROUPS - 5) * SAMPLES
    assert fleet.take_counts()["rollout/dropped_sequences"] == 5 * SAMPLES
    assert all(expected[name.replace("a few", "a")] == ids for name, ids in answers(enough).items())
    fleet.release(enough)

    def one_is_killed() -> None:
        """The engine's actor, outright: what it wrote before stays."""
        os.kill(fleet.members[0].call("processes")[0], signal.SIGKILL)

    killed = two.rolled_out("b", one_is_killed)
    counts = fleet.take_counts()
    assert counts["rollout/engine_failures"] == 1
    assert counts["rollout/requeued_sequences"] > 0
    assert list(answers(killed).values()) == list(expected.values())  # seeds are the requests' own
    two.whole()

    def a_core_is_stopped() -> None:
        for process in fleet.members[1].call("processes")[1:]:
            os.kill(process, signal.SIGSTOP)

    hung = two.rolled_out("c", a_core_is_stopped)
    counts = fleet.take_counts()
    assert (counts["rollout/engine_failures"], counts["rollout/engine_restarts"]) == (1, 1)
    assert list(answers(hung).values()) == list(expected.values())
    assert list(answers(first).values()) == list(expected.values())  # both of its engines are gone
    for handle in (first, killed, hung):
        fleet.release(handle)
    assert ray.get(fleet._store.held.remote()) == 0

    # Weights that are not finite: log mu is NaN, which is no answer. That is one failure more than are allowed.
    bad = {name: torch.full_like(w, torch.nan) if "lm_head" in name else w for name, w in two.weights.items()}
    send(fleet.members[0], 1, bad)
    with pytest.raises(EnginesFailed, match=r"3 engine failures, .*=2 are allowed; .* MalformedOutput: log mu"):
        two.rolled_out("d")
