"""Which groups a step trains on when several steps are under way. Threads are real; what they sample is a number."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dppo.trainer.window import Window, WindowState

SIZE = 3


class Sampler:
    """Groups end when they are told to; those in `slow` at the next step's `release` only."""

    def __init__(self, slow: frozenset[int] = frozenset()) -> None:
        self.asked: list[int] = []
        self.slow = slow
        self._gates = {number: threading.Event() for number in slow}

    def __call__(self, numbers: Sequence[int]) -> Iterator[Callable[[], int]]:
        for number in numbers:
            self.asked.append(number)
            yield partial(self._sample, number)

    def _sample(self, number: int) -> int:
        if number in self._gates:
            assert self._gates[number].wait(60)
        return number

    def release(self, *numbers: int) -> None:
        for number in numbers:
            self._gates[number].set()


def opened(sampler: Sampler, staleness: int = 2, steps: int = 5, state: WindowState | None = None) -> Window[int]:
    return Window(sampler, size=SIZE, staleness=staleness, steps=steps, state=state or WindowState())


def test_stragglers_are_trained_a_step_later_and_then_waited_for() -> None:
    sampler = Sampler(frozenset({1, 4}))
    window = opened(sampler)
    first = window.take(0)
    assert sampler.asked == [0, 1, 2, 3, 4, 5]
    assert len(first.groups) == SIZE
    assert set(first.groups) <= {0, 2, 3, 5}
    assert first.state == WindowState(6, tuple(sorted({*range(6)} - set(first.groups))))
    threading.Timer(0.05, sampler.release, [1]).start()
    second = window.take(1)  # 1 is of the step before: nobody goes on without it
    assert 1 in second.groups
    assert 4 not in second.groups
    assert second.late == sum(number < SIZE for number in second.groups)
    sampler.release(4)
    third = window.take(2)
    assert 4 in third.groups
    assert sampler.asked == list(range(12))
    window.close()


def test_what_a_group_fails_with_ends_the_step() -> None:
    def fails() -> int:
        raise ConnectionError("the engine is gone")

    sampler = Sampler(frozenset(range(6)))
    window: Window[int] = Window(
        lambda numbers: [fails if number == 5 else one for number, one in zip(numbers, sampler(numbers), strict=True)],
        size=SIZE,
        staleness=2,
        steps=2,
        state=WindowState(),
    )
    with pytest.raises(ConnectionError, match="the engine is gone"):
        window.take(0)
    sampler.release(*range(6))
    window.close()


@settings(max_examples=40)
@given(
    staleness=st.integers(2, 6),
    steps=st.integers(1, 7),
    stops=st.integers(0, 7),
    slow=st.frozensets(st.integers(0, 20)),
)
def test_every_group_is_trained_once_and_in_time(staleness: int, steps: int, stops: int, slow: frozenset[int]) -> None:
    """Also by a run that is resumed after `stops` steps: what waited is sampled anew. A group is begun `ahead` steps
    before its own at most and trained `late` steps after it at most, slow as it may be: slow ones end a step late."""
    trained: Counter[int] = Counter()
    state, sampler = WindowState(), Sampler(slow)
    window = opened(sampler, staleness, steps)
    for step in range(steps):
        if step == stops:
            sampler.release(*slow)  # of the run that ended
            window.close()
            sampler = Sampler(frozenset())
            window = opened(sampler, staleness, steps, state)
        before = len(sampler.asked)
        threading.Timer(0.01, sampler.release, sampler.slow & set(range((step + 1) * SIZE))).start()
        taken = window.take(step)
        assert len(taken.groups) == SIZE
        assert all(number // SIZE <= step + window.ahead for number in sampler.asked[before:])
        assert all(step - window.late <= number // SIZE <= step + window.ahead for number in taken.groups)
        trained.update(taken.groups)
        state = taken.state
        assert not set(state.waiting) & trained.keys()
    window.close()
    assert trained == Counter(range(steps * SIZE))
    assert state == WindowState(steps * SIZE, ())
    assert window.ahead + window.late == staleness
