"""Engines that do not start: one among others is tried again, all of them are a setting that is wrong.

The engines are starts that the test ends well or badly; seats, dispatch and its thread are the real ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.engine import EngineDead, EnginesFailed
from megatron_dppo.rollout.fleet.dispatcher import Dispatch
from megatron_dppo.rollout.fleet.replica import Seat
from tests.distributed import PATIENCE_S


class Start:
    """The reference of a start's result."""

    def __init__(self) -> None:
        self.result: Future[int] = Future()

    def future(self) -> Future[int]:
        return self.result


class Engine:
    """An engine of which there is nothing but its start."""

    def __init__(self, name: str) -> None:
        self.name, self.started, self.killed = name, Start(), False

    def kill(self) -> None:
        self.killed = True


class Place(Seat):
    """A seat that remembers who sat there."""

    engines: list[Engine]

    def _new_engine(self) -> Any:
        self.engines = [*getattr(self, "engines", []), Engine(f"{self._name}-{self.number}")]
        return self.engines[-1]


class Starts:
    """Three seats whose engines load."""

    def __init__(self, count: int = 3, most: int = 8) -> None:
        config = RolloutConfig(max_engine_failures=most)
        self.seats = [Place(Path("model"), config, f"engine-{n}", {}, None) for n in range(count)]
        self.dispatch = Dispatch(self.seats, config, None, "store")
        self._threads = ThreadPoolExecutor(1)

    def up(self, number: int) -> None:
        self.seats[number].engine.started.result.set_result(0)

    def fail(self, number: int, reason: str) -> None:
        self.seats[number].engine.started.result.set_exception(EngineDead(reason))

    def meanwhile[T](self, call: Callable[[], T]) -> Future[T]:
        return self._threads.submit(call)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def heard(self) -> None:
        """All that has happened so far has been dealt with."""
        self.dispatch.ask(lambda: None)


@pytest.fixture
def make() -> Iterator[Callable[..., Starts]]:
    made: list[Starts] = []

    def one(*arguments: int) -> Starts:
        made.append(Starts(*arguments))
        return made[-1]

    yield one
    for starts in made:
        starts.dispatch.close()


@pytest.mark.parametrize("bad_one_first", [True, False])
def test_a_bad_start_among_good_ones_is_a_failure_and_tried_again(make: Any, bad_one_first: bool) -> None:
    starts = make()
    members = starts.meanwhile(lambda: starts.dispatch.hold_for(1, drain=True))
    if bad_one_first:
        starts.fail(1, "no room")
        starts.heard()
        time.sleep(0.1)
        assert len(starts.seats[1].engines) == 1, "nobody knows yet whether any engine starts"
        starts.up(0)
    else:
        starts.up(0)
        starts.heard()
        starts.fail(1, "no room")
    starts.until(lambda: len(starts.seats[1].engines) == 2)
    assert starts.seats[1].engines[0].killed
    assert [engine.name for engine in starts.seats[1].engines] == ["engine-1-0", "engine-1-1"]
    assert not members.done(), "the third loads for the first time"
    starts.up(2)
    assert [engine.name for engine in members.result(PATIENCE_S)] == ["engine-0-0", "engine-2-0"]
    everybody = starts.meanwhile(starts.dispatch.wait_until_up)
    time.sleep(0.1)
    assert not everybody.done()
    starts.up(1)
    everybody.result(PATIENCE_S)
    counts = starts.dispatch.ask(starts.dispatch.take_counts)
    assert (counts["rollout/engine_failures"], counts["rollout/engine_restarts"]) == (1, 1)


@pytest.mark.parametrize("count", [1, 3])
def test_where_no_engine_starts_the_first_reason_ends_it_at_once(make: Any, count: int) -> None:
    starts = make(count)
    everybody = starts.meanwhile(starts.dispatch.wait_until_up)
    for number in reversed(range(count)):
        starts.fail(number, f"reason of {number}")
    with pytest.raises(EngineDead, match=rf"^reason of {count - 1}$"):
        everybody.result(PATIENCE_S)
    assert [len(seat.engines) for seat in starts.seats] == [1] * count, "nothing was tried again"


def test_starts_that_go_on_failing_are_counted_to_the_limit(make: Any) -> None:
    starts = make(2, 2)
    everybody = starts.meanwhile(starts.dispatch.wait_until_up)
    starts.up(0)
    for attempt in range(1, 4):
        starts.until(lambda: len(starts.seats[1].engines) == attempt)  # noqa: B023
        starts.fail(1, "no room")
    with pytest.raises(
        EnginesFailed, match=r"3 engine failures, .*=2 are allowed; .* did not start: EngineDead: no room"
    ):
        everybody.result(PATIENCE_S)
    assert len(starts.seats[1].engines) == 3


def test_two_bad_starts_over_the_limit_end_it_once(make: Any) -> None:
    starts = make(3, 0)
    everybody = starts.meanwhile(starts.dispatch.wait_until_up)
    for number in (1, 2):
        starts.fail(number, "no room")
    starts.heard()
    starts.up(0)
    with pytest.raises(
        EnginesFailed, match=r"^1 engine failures, rollout.max_engine_failures=0 .* engine engine-1-0 did"
    ):
        everybody.result(PATIENCE_S)
    assert [len(seat.engines) for seat in starts.seats] == [1, 1, 1]
