"""Groups of several steps under way at once; a step trains on those that finished first (`rollout.schedule: window`).

```
begun with step   s - 1            s                s + 1
                  groups ──► some finished ──► trained in step s: as many as a step has, first in, first out
                                └─ others go on, through the weight sync (`rollout.partial_rollouts`) ──► step s + 1 ...
```
Groups are numbered as the prompts are; those of step `s` are `s * size` and the `size - 1` after it. One is begun at
most `ahead` steps before its own and waited for `late` steps after it, so no token is older than the two together, and
a step never has more groups to wait for than it trains on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial


@dataclass(frozen=True)
class WindowState:
    """Where a window is after a step: all that a training state keeps of it."""

    begun: int = 0
    """Groups that were begun so far."""
    waiting: tuple[int, ...] = ()
    """Numbers of those that no step has trained on. A run that is resumed samples them anew, with its own weights."""


@dataclass(frozen=True)
class Taken[T]:
    """The groups of a step."""

    groups: list[T]
    """In the order of their numbers."""
    state: WindowState
    begun_at: float
    """`time.perf_counter` when the first of them was begun."""
    late: int
    """Groups of earlier steps among them."""


class Window[T]:
    """`take` is called by one thread after another; groups are sampled in threads of their own."""

    def __init__(
        self,
        sample: Callable[[Sequence[int]], Iterable[Callable[[], T]]],
        *,
        size: int,
        staleness: int,
        steps: int,
        state: WindowState,
    ) -> None:
        """
        sample     what samples each of the groups of these numbers, and blocks
        size       groups that a step trains on
        staleness  at least 2: steps that a token may be older than the weights that train on it
        steps      of the run: later groups are not begun
        """
        self._sample, self._size, self._steps = sample, size, steps
        self.ahead = (staleness + 1) // 2
        self.late = staleness - self.ahead
        self._resumed, self._begun = state.waiting, state.begun
        self._threads = ThreadPoolExecutor((self.ahead + 1) * size, thread_name_prefix="group")
        self._started: dict[int, float] = {}
        """When each group that waits was begun."""
        self._finished: dict[int, Future[T]] = {}
        """First in, first out."""
        self._changed = threading.Condition()

    def take(self, step: int) -> Taken[T]:
        """The groups of `step` (0-based), when there are enough. Raises what a group failed with."""
        self._begin(step)
        first, end = step * self._size, (step - self.late + 1) * self._size
        must = {number for number in self._started if number < end}
        with self._changed:
            self._changed.wait_for(lambda: self._failed() or self._enough(must))
            if (error := self._failed()) is not None:
                raise error
            others = [number for number in self._finished if number not in must]
            chosen = sorted([*must, *others[: self._size - len(must)]])
            groups = [self._finished.pop(number).result() for number in chosen]
        begun_at = min(self._started.pop(number) for number in chosen)
        state = WindowState(self._begun, tuple(sorted(self._started)))
        return Taken(groups, state, begun_at, sum(number < first for number in chosen))

    def close(self) -> None:
        """Groups that nobody takes any more are given up; the end of the engines ends their threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin(self, step: int) -> None:
        stop = min(step + self.ahead + 1, self._steps) * self._size
        numbers = [*self._resumed, *range(self._begun, stop)]
        self._resumed, self._begun = (), max(self._begun, stop)
        for number, group in zip(numbers, self._sample(numbers), strict=True):
            self._started[number] = time.perf_counter()
            self._threads.submit(group).add_done_callback(partial(self._finish, number))

    def _finish(self, number: int, done: Future[T]) -> None:
        with self._changed:
            self._finished[number] = done
            self._changed.notify_all()

    def _enough(self, must: set[int]) -> bool:
        return len(self._finished) >= self._size and must <= self._finished.keys()

    def _failed(self) -> BaseException | None:
        return next((error for done in self._finished.values() if (error := done.exception()) is not None), None)
