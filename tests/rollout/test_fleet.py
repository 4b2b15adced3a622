"""Two engines as one: work is spread, results outlive their engine, and what one loses the other does."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import ray
import torch

from megatron_dppo.batch import RolloutBatch
from megatron_dppo.checkpoint.weight_layout import pack
from megatron_dppo.rollout.engine import EngineClosed, EnginesFailed, GenerationRequest
from megatron_dppo.rollout.fleet.fleet import EngineFleet
from megatron_dppo.rollout.fleet.host import RemoteEngine
from megatron_dppo.rollout.fleet.replica import Replica
from megatron_dppo.rollout.fleet.store import RolloutSource
from megatron_dppo.rollout.ray_session import RaySession
from megatron_dppo.rollout.stored import RolloutHandle
from megatron_dppo.rollout.weight_transfer.recipients import Recipients
from tests.distributed import PATIENCE_S
from tests.processes import processes_of
from tests.rollout.conftest import CONFIG, SAMPLING, making
from tests.rollout.reference import model_with, other_weights
from tests.rollout.spans import check_spans, check_tokens
from tests.tiny import VOCAB_SIZE, tiny_qwen3_moe

GROUPS, SAMPLES = 24, 4
FLEET = CONFIG.model_copy(
    update={
        "engines": 2,
        "schedule": "one_step_off",
        "partial_rollouts": True,
        "sequences_per_object": 8,
        "stall_timeout_s": 20.0,
        "max_engine_failures": 2,
        "max_tokens_in_flight": 8 * 64 * 3,  # three pieces of work at once
    }
)
LONG = replace(SAMPLING, max_tokens=24, top_k_logprobs=4, stop_token_ids=tuple(range(2, 16)))
"""One token in twenty ends an answer, so that some have ended while others of the same call go on."""


def groups(name: str, count: int = GROUPS, seed: int = 0) -> list[GenerationRequest]:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(2, VOCAB_SIZE, rng.integers(4, 40)).astype(np.int32) for _ in range(count)]
    return [
        GenerationRequest(request_id=f"{name}/{g}/{s}", prompt_ids=prompt, seed=100 * g + s)
        for g, prompt in enumerate(prompts)
        for s in range(SAMPLES)
    ]


def send(engines: Sequence[RemoteEngine], version: int, weights: dict[str, torch.Tensor]) -> None:
    """As the trainer does: every call to all engines at once."""
    to = Recipients(engines, timeout_s=PATIENCE_S)
    to.wait(to.ask(lambda engine: engine.begin_update(version)))
    for bucket in pack(weights.items(), 1 << 20):
        to.wait(to.ask(lambda engine: engine.receive_bucket(version, bucket)))  # noqa: B023
    to.wait(to.ask(lambda engine: engine.end_update(version, {})))
    assert not to.errors


def at_it(engine: RemoteEngine) -> int:
    """Tokens of the responses that it has ended of what it is at."""
    return sum(engine.ask(lambda one: one.alive(), "control").result().ended.values())


def answers(handle: RolloutHandle) -> dict[str, list[int]]:
    return dict(zip(handle.request_ids, (ids.tolist() for ids in RolloutSource(handle).token_ids()), strict=True))


@dataclass
class Fleet:
    fleet: EngineFleet
    model: Path
    weights: dict[str, torch.Tensor]
    version: int = 0

    @property
    def replicas(self) -> list[Replica]:
        return self.fleet._dispatcher._replicas

    def rolled_out(self, name: str, disturb: Callable[[], None] | None = None, *, count: int = GROUPS) -> RolloutHandle:
        """A rollout of all groups, disturbed once it is under way. New engines get the current weights meanwhile."""
        return self.disturbed(lambda: self.fleet.generate_stored(asked, LONG), asked := groups(name, count), disturb)

    def disturbed[T: (RolloutHandle, RolloutBatch)](
        self, generate: Callable[[], T], asked: Sequence[GenerationRequest], disturb: Callable[[], None] | None
    ) -> T:
        with ThreadPoolExecutor(1) as threads:
            found: Future[T] = threads.submit(generate)
            if disturb is not None:
                while sum(len(replica.running) for replica in self.replicas) < 4 and not found.done():
                    time.sleep(0.005)
                try:
                    disturb()
                except BaseException:
                    self.fleet.close()  # nobody would give the others work
                    raise
            while not found.done():
                self.refill()
                time.sleep(0.1)
        made = found.result()
        assert made.request_ids == tuple(r.request_id for r in asked)  # each once, in order
        return made

    def sync(self, weights: dict[str, torch.Tensor]) -> dict[str, set[str]]:
        """These weights, as the next version, to both engines. Returns the requests that each had meanwhile."""
        self.version, self.weights = self.version + 1, weights
        members = self.fleet.members_to_sync(self.version)
        assert len(members) == 2
        given = self.fleet._dispatcher.ask(
            lambda: {
                one.engine.name: {r.request_id for w in one.running.values() for r in w.requests}
                for one in self.replicas
            }
        )
        send(members, self.version, weights)
        self.fleet.synced(self.version, members, {})
        return given

    def refill(self) -> None:
        if behind := self.fleet.members_behind():
            send(behind, self.version, self.weights)
            self.fleet.synced(self.version, behind, {})

    def until_both_are_at_it(self) -> None:
        """Wait until each engine has ended a response of what it was given; others are under way then."""
        deadline = time.monotonic() + PATIENCE_S
        while not all(at_it(member) for member in self.fleet.members):
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def whole(self) -> list[RemoteEngine]:
        """Both engines, once they are up with the current weights."""
        deadline = time.monotonic() + PATIENCE_S
        while len(self.fleet.members) < 2 or self.fleet.members_behind():
            self.refill()
            assert time.monotonic() < deadline, "no engine took its place"
            time.sleep(0.1)
        return self.fleet.members


@pytest.fixture(scope="module")
def two(kind: str, ray_session: RaySession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    model = tmp_path_factory.mktemp("fleet")
    tiny_qwen3_moe(model, seed=1, num_hidden_layers=1)
    config = FLEET.model_copy(update={"engine": kind})
    fleet = EngineFleet(making(model, config), config, name=f"two-{kind}")
    try:
        served = Fleet(fleet, model, {})
        served.sync(other_weights(model, seed=5))
        yield served
    finally:
        fleet.close()
        with pytest.raises((EngineClosed, EnginesFailed)):
            fleet.generate(groups("after the end"), LONG, training=True)


def test_a_sync_cuts_what_is_under_way_on_both_engines(two: Fleet, tmp_path: Path) -> None:
    """Sampled here and left in the object store; whoever waited for an engine gets the new weights alone."""
    fleet, models = two.fleet, {1: model_with(two.model, two.weights, tmp_path / "1")}
    fleet.take_counts()
    given: dict[str, set[str]] = {}

    def other_weights_come() -> None:
        two.until_both_are_at_it()
        given.update(two.sync(weights := other_weights(two.model, seed=5 + two.version)))
        models[two.version] = model_with(two.model, weights, tmp_path / str(two.version))

    for attempt in range(4):  # one of them may have ended all of its own when the sync came
        batch = two.disturbed(
            lambda: fleet.generate(asked, LONG, training=True),
            asked := groups(f"cut {attempt}", 48),
            other_weights_come,
        )
        cut = {batch.request_ids[b] for b in check_spans(batch, LONG)}
        assert len(given) == 2
        assert cut <= set().union(*given.values())  # what came later is of the new weights from its first token on
        check_tokens(batch, {version: models[version] for version in (two.version - 1, two.version)})
        if all(cut & held for held in given.values()):
            break
    for name, held in given.items():
        assert 1 <= len(cut & held) <= FLEET.max_num_seqs, name

    handle = two.rolled_out("cut and stored", other_weights_come, count=48)
    source = RolloutSource(handle).rows(np.arange(len(handle)))
    assert source.policy is not None
    assert source.routes is not None
    trained, versions = source.policy.loss_mask, source.routes.weight_versions  # a row's route and target: one forward
    assert set(versions[trained].tolist()) == {two.version - 1, two.version}
    assert (handle.versions[:, 0] < handle.versions[:, 1]).any()
    np.testing.assert_array_equal(handle.trained, source.trained_per_sequence)
    np.testing.assert_array_equal(
        handle.version_sums, np.add.reduceat(np.where(trained, versions.astype(np.int64), 0), source.offsets[:-1])
    )
    fleet.release(handle)
    assert not any(fleet.take_counts().values())


def test_engines_that_die_hang_or_answer_nonsense_lose_no_request_and_double_none(two: Fleet) -> None:
    fleet = two.fleet
    expected = answers(first := two.rolled_out("a"))
    assert (first.versions == two.version).all()
    fleet.take_counts()
    # Enough of them: whole groups, in the order asked for, and the rest is counted.
    enough = fleet.generate_stored(asked := groups("a few"), LONG, enough=GROUPS - 5)
    names = [r.request_id for r in asked]
    places = [names.index(request_id) for request_id in enough.request_ids]
    assert places == sorted(set(places))
    assert len(places) == (GROUPS - 5) * SAMPLES
    assert fleet.take_counts()["rollout/dropped_sequences"] == 5 * SAMPLES
    assert all(expected[name.replace("a few", "a")] == ids for name, ids in answers(enough).items())
    fleet.release(enough)

    def one_is_killed() -> None:
        """The engine's actor, outright: what it wrote before stays."""
        os.kill(processes_of(fleet.members[0])[0], signal.SIGKILL)

    killed = two.rolled_out("b", one_is_killed)
    counts = fleet.take_counts()
    assert counts["rollout/engine_failures"] == 1
    assert counts["rollout/requeued_sequences"] > 0
    assert list(answers(killed).values()) == list(expected.values())  # seeds are the requests' own
    two.whole()

    def a_core_is_stopped() -> None:
        host, *core = processes_of(fleet.members[1])
        for process in core or [host]:
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
    send(fleet.members[:1], two.version, bad)
    told = r"3 engine failures, .*=2 are allowed; .* MalformedOutput: log mu .* have diverged \(optimizer\.lr\)"
    with pytest.raises(EnginesFailed, match=told):
        two.rolled_out("d")
