"""Engines that do not start: one among others is tried again, all of them are a setting that is wrong.

The engines are starts that the test ends well or badly; replicas, dispatcher and its loop are the real ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from megatron_dppo.errors import UserError
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.engine import EngineDead, EnginesFailed, GenerationRequest, SamplingConfig
from megatron_dppo.rollout.fleet.dispatcher import Dispatcher
from megatron_dppo.rollout.fleet.replica import Replica
from megatron_dppo.rollout.fleet.work import Ticket
from tests.distributed import PATIENCE_S


class Engine:
    """An engine of which there is nothing but its start."""

    def __init__(self, name: str) -> None:
        self.name, self.killed = name, False
        self.started: Future[int] = Future()

    def kill(self) -> None:
        self.killed = True


class Remembering(Replica):
    """A replica that remembers its engines, and has all the time for those after the first."""

    engines: list[Engine]

    def _new_engine(self) -> Any:
        if self.number:
            self._config = self._config.model_copy(update={"start_timeout_s": 600.0})
        self.engines = [*getattr(self, "engines", []), Engine(f"{self._name}-{self.number}")]
        return self.engines[-1]


def _nothing() -> Any:
    raise AssertionError("no engine is made here")


class Starts:
    """Replicas whose engines load."""

    def __init__(self, count: int = 3, most: int = 8, hurried: int = 0) -> None:
        """The last `hurried` ones must start within a fraction of a second."""
        config = RolloutConfig(max_engine_failures=most)
        limits = [600.0] * (count - hurried) + [0.2] * hurried
        self.replicas = [
            Remembering(_nothing, config.model_copy(update={"start_timeout_s": s}), f"engine-{n}", {}, None)
            for n, s in enumerate(limits)
        ]
        self.dispatcher = Dispatcher(self.replicas, config, None, "store")
        self._threads = ThreadPoolExecutor(1)

    def up(self, number: int) -> None:
        self.replicas[number].engine.started.set_result(0)

    def fail(self, number: int, reason: str) -> None:
        self.replicas[number].engine.started.set_exception(EngineDead(reason))

    def meanwhile[T](self, call: Callable[[], T]) -> Future[T]:
        return self._threads.submit(call)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def heard(self) -> None:
        """All that has happened so far has been dealt with."""
        self.dispatcher.ask(lambda: None)


@pytest.fixture
def make() -> Iterator[Callable[..., Starts]]:
    made: list[Starts] = []

    def one(*arguments: int, **options: int) -> Starts:
        made.append(Starts(*arguments, **options))
        return made[-1]

    yield one
    for starts in made:
        starts.dispatcher.close()


@pytest.mark.parametrize("bad_one_first", [True, False])
def test_a_bad_start_among_good_ones_is_a_failure_and_tried_again(make: Any, bad_one_first: bool) -> None:
    starts = make()
    members = starts.meanwhile(lambda: starts.dispatcher.hold_for(1, drain=True))
    if bad_one_first:
        starts.fail(1, "no room")
        starts.heard()
        time.sleep(0.1)
        assert len(starts.replicas[1].engines) == 1, "nobody knows yet whether any engine starts"
        starts.up(0)
    else:
        starts.up(0)
        starts.heard()
        starts.fail(1, "no room")
    starts.until(lambda: len(starts.replicas[1].engines) == 2)
    assert starts.replicas[1].engines[0].killed
    assert [engine.name for engine in starts.replicas[1].engines] == ["engine-1-0", "engine-1-1"]
    assert not members.done(), "the third loads for the first time"
    starts.up(2)
    assert [engine.name for engine in members.result(PATIENCE_S)] == ["engine-0-0", "engine-2-0"]
    everybody = starts.meanwhile(starts.dispatcher.wait_until_up)
    time.sleep(0.1)
    assert not everybody.done()
    starts.up(1)
    everybody.result(PATIENCE_S)
    counts = starts.dispatcher.ask(starts.dispatcher.take_counts)
    assert (counts["rollout/engine_failures"], counts["rollout/engine_restarts"]) == (1, 1)


@pytest.mark.parametrize("count", [1, 3])
def test_where_no_engine_starts_the_first_reason_ends_it_at_once(make: Any, count: int) -> None:
    starts = make(count)
    everybody = starts.meanwhile(starts.dispatcher.wait_until_up)
    for number in reversed(range(count)):
        starts.fail(number, f"reason of {number}")
    with pytest.raises(EngineDead, match=rf"^reason of {count - 1}$"):
        everybody.result(PATIENCE_S)
    assert [len(replica.engines) for replica in starts.replicas] == [1] * count, "nothing was tried again"


def test_starts_that_go_on_failing_are_counted_to_the_limit(make: Any) -> None:
    starts = make(2, 2)
    everybody = starts.meanwhile(starts.dispatcher.wait_until_up)
    starts.up(0)
    for attempt in range(1, 4):
        starts.until(lambda: len(starts.replicas[1].engines) == attempt)  # noqa: B023
        starts.fail(1, "no room")
    with pytest.raises(
        EnginesFailed, match=r"3 engine failures, .*=2 are allowed; .* did not start: EngineDead: no room"
    ):
        everybody.result(PATIENCE_S)
    assert len(starts.replicas[1].engines) == 3


def test_two_bad_starts_over_the_limit_end_it_once(make: Any) -> None:
    starts = make(3, 0)
    everybody = starts.meanwhile(starts.dispatcher.wait_until_up)
    for number in (1, 2):
        starts.fail(number, "no room")
    starts.heard()
    starts.up(0)
    with pytest.raises(
        EnginesFailed, match=r"^1 engine failures, rollout.max_engine_failures=0 .* engine engine-1-0 did"
    ):
        everybody.result(PATIENCE_S)
    assert [len(replica.engines) for replica in starts.replicas] == [1, 1, 1]


def test_an_engine_that_does_not_come_up_in_time_is_a_failure_and_tried_again(make: Any) -> None:
    starts = make(2, hurried=1)
    members = starts.meanwhile(lambda: starts.dispatcher.hold_for(1, drain=True))
    starts.until(lambda: starts.dispatcher._unproven)
    assert len(starts.replicas[1].engines) == 1, "nobody knows yet whether any engine starts"
    starts.up(0)
    starts.until(lambda: len(starts.replicas[1].engines) == 2)
    late, again = starts.replicas[1].engines
    assert late.killed
    late.started.set_result(0)  # it comes up after all, when another has its place
    starts.heard()
    assert [engine.name for engine in members.result(PATIENCE_S)] == ["engine-0-0"]
    assert not starts.replicas[1].up
    again.started.set_result(0)
    starts.until(lambda: starts.replicas[1].up)
    counts = starts.dispatcher.ask(starts.dispatcher.take_counts)
    assert (counts["rollout/engine_failures"], counts["rollout/engine_restarts"]) == (1, 1)


def test_where_no_engine_comes_up_in_time_the_setting_is_named(make: Any) -> None:
    starts = make(2, hurried=2)
    with pytest.raises(
        UserError, match=r"^engine engine-0-0 was not ready within rollout.start_timeout_s=0.2 s; raise that, or look"
    ):
        starts.meanwhile(starts.dispatcher.wait_until_up).result(PATIENCE_S)
    assert [len(replica.engines) for replica in starts.replicas] == [1, 1], "nothing was tried again"


def test_a_run_that_gets_engines_of_another_one_counts_its_own_failures(make: Any) -> None:
    starts = make(3, most=1)
    starts.up(0)
    starts.fail(1, "no room")
    starts.until(lambda: len(starts.replicas[1].engines) == 2)
    starts.dispatcher.ask(starts.dispatcher.begin_run)
    assert not any(starts.dispatcher.ask(starts.dispatcher.take_counts).values())
    starts.fail(2, "no room")
    starts.until(lambda: len(starts.replicas[2].engines) == 2)
    assert starts.dispatcher.ask(starts.dispatcher.take_counts)["rollout/engine_failures"] == 1
    starts.fail(1, "no room")
    with pytest.raises(EnginesFailed, match=r"^2 engine failures, rollout.max_engine_failures=1 "):
        starts.dispatcher.wait_until_up()


class Asked(Engine):
    """One that is up, and whose answers the test gives."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.answers: list[Future[Any]] = []
        self.started.set_result(0)

    def ask(self, call: Any, lane: str) -> Future[Any]:
        answer: Future[Any] = Future()
        if lane == "work":
            self.answers.append(answer)
        return answer


class Answering(Remembering):
    def _new_engine(self) -> Any:
        return Asked(self._name)


def test_work_that_an_engine_refuses_holds_up_no_sync() -> None:
    """A sync that lets running work end waits for none that has ended, however it did."""
    replica = Answering(_nothing, RolloutConfig(), "engine-0", {}, None)
    dispatcher, threads = Dispatcher([replica], RolloutConfig(), None, "store"), ThreadPoolExecutor(1)
    try:
        dispatcher.wait_until_up()
        request = GenerationRequest(request_id="a", prompt_ids=np.ones(3, np.int32), seed=0)
        ticket = Ticket([[request]], SamplingConfig(), training=True)
        asked = threads.submit(dispatcher.wait_for, ticket)
        deadline = time.monotonic() + PATIENCE_S
        while not replica.engine.answers:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        replica.engine.answers[0].set_exception(UserError("the prompt is too long"))
        with pytest.raises(UserError, match="the prompt is too long"):
            asked.result(PATIENCE_S)
        drained = threads.submit(dispatcher.hold_for, 1, drain=True)
        assert [engine.name for engine in drained.result(PATIENCE_S / 10)] == ["engine-0"]
    finally:
        dispatcher.close()
        threads.shutdown()
