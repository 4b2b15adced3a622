"""Gives work to engines and takes it back from those that fail."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import ray

from megatron_dppo.errors import UserError
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.engine import EngineClosed, EnginesFailed, GenerationTimeout, MalformedOutput
from megatron_dppo.rollout.event_thread import EventThread
from megatron_dppo.rollout.fleet.remote_engine import RayRolloutEngine
from megatron_dppo.rollout.fleet.replica import Seat
from megatron_dppo.rollout.fleet.work import Ticket, Work
from megatron_dppo.rollout.stored import column_names

_MOST_TIMEOUTS = 2

COUNTED = ("engine_failures", "engine_restarts", "requeued_sequences", "lost_tokens", "request_timeouts",
           "dropped_sequences")  # fmt: skip

logger = logging.getLogger(__name__)


class Dispatch:
    """The engines' seats and the work that waits for them, which one thread alone changes. What is not said to be for
    any thread is for that one."""

    def __init__(self, seats: Sequence[Seat], config: RolloutConfig, store: Any, store_name: str) -> None:
        self._seats, self._config = list(seats), config
        self._store, self._store_name = store, store_name
        self._waiting: deque[Work] = deque()
        self._tickets: list[Ticket] = []
        self._held = False
        """Whether no work is given out, for a weight sync."""
        self._syncing = False
        """Whether cores load weights, and may take as long as `rollout.sync_timeout_s` allows."""
        self._current: int | None = None
        """Version that engines must have to get work; None is the checkpoint that they start from."""
        self._any_loaded = False
        """Whether an engine ever came up: whatever fails then is no fault of the settings."""
        self._unproven: list[tuple[Seat, BaseException]] = []
        """First engines of their seats that failed to start before any came up, and why."""
        self._failures = 0
        self._counts: Counter[str] = Counter()
        self._replacing: list[threading.Thread] = []
        self._thread = EventThread("engine-fleet", after_each=self._go_on, at_the_end=self._give_up)
        for seat in self._seats:
            self._expect(seat)
        self._thread.start()

    # For any thread

    def ask[T](self, question: Callable[[], T]) -> T:
        """See `EventThread.ask`."""
        return self._thread.ask(question)

    def wait_for(self, ticket: Ticket) -> list[Any]:
        """Have a ticket's work done; see `Ticket.wait`."""
        self.ask(lambda: self._submit(ticket))
        try:
            return ticket.wait()
        finally:
            self._thread.put(lambda: self._leave(ticket))

    def wait_until_up(self) -> None:
        """Until every engine has loaded; raises what ended this object before that."""
        self._thread.until(lambda: all(seat.up for seat in self._seats))

    def hold_for(self, version: int, *, drain: bool) -> list[RayRolloutEngine]:
        """See `EngineFleet.members_to_sync`."""
        self._thread.until(lambda: all(seat.up or seat.number > 0 for seat in self._seats))

        def hold() -> None:
            self._held, self._current = True, version

        self.ask(hold)
        self._thread.until(lambda: any(seat.up for seat in self._seats))
        if drain:
            self._thread.until(lambda: not any(seat.running for seat in self._seats))
            self._thread.until(lambda: any(seat.up for seat in self._seats))

        def begin() -> list[RayRolloutEngine]:
            self._syncing = True
            return self.members()

        return self.ask(begin)

    def close(self) -> list[RayRolloutEngine]:
        """End the thread; returns the engines, for whom this was the last owner. The second time there are none."""
        if not self._thread.alive and not self._seats:
            return []
        if self._thread.alive:
            self._thread.put(lambda: self._thread.end(EngineClosed("the engines are closed")))
            self._thread.join()
        for thread in self._replacing:
            thread.join()
        seats, self._seats = self._seats, []
        return [seat.engine for seat in seats]

    # For its own thread

    def members(self) -> list[RayRolloutEngine]:
        return [seat.engine for seat in self._seats if seat.up]

    def behind(self) -> list[RayRolloutEngine]:
        return [seat.engine for seat in self._seats if seat.up and seat.version != self._current]

    def synced(self, version: int, members: Sequence[RayRolloutEngine], failed: Mapping[str, Exception]) -> None:
        names = {member.name for member in members}
        for seat in self._seats:
            if seat.engine.name not in names or not seat.up:
                continue
            seat.version = version
            if seat.engine.name in failed:
                error = failed[seat.engine.name]
                self._lose(seat, f"did not get weight version {version}: {_said(error)}")
        self._held = self._syncing = False

    def take_counts(self) -> dict[str, float]:
        taken = {f"rollout/{name}": float(self._counts[name]) for name in COUNTED}
        self._counts.clear()
        return taken

    def _go_on(self) -> None:
        """After every event."""
        self._look_after()
        self._assign()

    def _give_up(self, reason: BaseException) -> None:
        """Nothing more happens here."""
        for ticket in self._tickets:
            ticket.fail(reason)

    def _submit(self, ticket: Ticket) -> None:
        if self._thread.end_reason is not None:
            raise self._thread.end_reason
        self._tickets.append(ticket)
        if ticket.training:
            self._waiting.extend(ticket.work)
        else:  # an evaluation holds the trainer up
            self._waiting.extendleft(reversed(ticket.work))

    def _leave(self, ticket: Ticket) -> None:
        """Nobody waits for a ticket any more: take back what has not ended of it."""
        self._tickets.remove(ticket)
        given_up = [work for work in self._waiting if work.ticket is ticket]
        self._waiting = deque(work for work in self._waiting if work.ticket is not ticket)
        for seat in self._seats:
            for work in seat.running.values():
                if work.ticket is ticket:
                    given_up.append(work)
                    seat.engine.start("abandon", work.key)
        self._counts["dropped_sequences"] += sum(len(work.requests) for work in given_up)

    def _assign(self) -> None:
        """To the engine with the fewest tokens in flight, first come, first served."""
        while self._waiting and not self._held:
            work = self._waiting[0]
            free = [s for s in self._seats if s.up and s.version == self._current and s.has_room(work)]
            if not free:
                return
            self._give(min(free, key=lambda seat: seat.tokens), self._waiting.popleft())

    def _give(self, seat: Seat, work: Work) -> None:
        ticket, engine = work.ticket, seat.engine
        if ticket.stored:
            names = column_names(ticket.layer_groups)
            results = engine.start(
                "generate_columns", work.requests, ticket.law, self._store_name, work.key, ticket.layer_groups,
                returns=1 + len(names),
            )  # fmt: skip
        else:
            results = [engine.start("generate", work.requests, ticket.law, ticket.training, work.key)]
        seat.running[work.key] = work
        key = work.key
        self._thread.watch(results[0], lambda result: self._finished(seat, key, results[1:], result))

    def _finished(self, seat: Seat, key: str, columns: list[ray.ObjectRef], result: Future[Any]) -> None:
        work = seat.running.get(key)
        if work is None:  # the engine was given up meanwhile, and its work is somebody else's
            return
        ticket, error = work.ticket, result.exception()
        asked = tuple(request.request_id for request in work.requests)
        if error is None and result.result().request_ids != asked:
            error = MalformedOutput(f"asked for {asked[0]} and {len(asked) - 1} more, others were answered")
        cause = _cause(error)
        if ticket.closed or cause is None:
            del seat.running[key]
        if ticket.closed:
            if ticket in self._tickets:  # enough came already, and who waited for it has not left yet
                self._counts["dropped_sequences"] += len(work.requests)
            return
        if cause is None:
            ticket.deliver(work, (result.result(), self._known(work, columns)) if ticket.stored else result.result())
        elif isinstance(cause, UserError):
            ticket.fail(cause)
        elif isinstance(cause, GenerationTimeout):
            del seat.running[key]
            self._counts["request_timeouts"] += 1
            work.timeouts += 1
            if work.timeouts == _MOST_TIMEOUTS:
                ticket.fail(cause)
            else:
                self._requeue([work])
        else:
            self._lose(seat, f"failed: {_said(cause)}")

    def _known(self, work: Work, columns: list[ray.ObjectRef]) -> ray.ObjectRef:
        """Make the store know a result; resolves when it does."""
        return self._store.put.remote(work.key, dict(zip(column_names(work.ticket.layer_groups), columns, strict=True)))

    def _requeue(self, lost: Sequence[Work]) -> None:
        for work in reversed(lost):
            if not work.ticket.closed:
                work.again()
                self._waiting.appendleft(work)
                self._counts["requeued_sequences"] += len(work.requests)

    def _lose(self, seat: Seat, reason: str) -> None:
        """Give up the engine of a seat: its work goes to the others, and another engine takes the seat."""
        if self._thread.end_reason is not None:
            return
        lost, tokens = seat.empty()
        self._failures += 1
        self._counts["engine_failures"] += 1
        self._counts["lost_tokens"] += tokens
        self._requeue(lost)
        told = f"engine {seat.engine.name} {reason}"
        if self._failures > self._config.max_engine_failures:
            return self._thread.end(
                EnginesFailed(
                    f"{self._failures} engine failures, rollout.max_engine_failures={self._config.max_engine_failures} "
                    f"are allowed; the last one: {told}; look into the engines' logs"
                )
            )
        logger.warning("%s; another one takes its place, %d sequences are sampled anew", told, _sequences(lost))
        thread = threading.Thread(target=self._replace, args=(seat,), daemon=True)
        self._replacing.append(thread)
        thread.start()

    def _replace(self, seat: Seat) -> None:
        """On a thread of its own, since it takes seconds."""
        try:
            seat.replace()
        except Exception as error:  # nobody joins this thread before the end, and the seat would stay empty unseen
            self._thread.put(partial(self._thread.end, error))
            return
        self._thread.put(lambda: self._expect(seat))

    def _expect(self, seat: Seat) -> None:
        number = seat.number
        self._thread.watch(seat.engine.started, lambda result: self._loaded(seat, number, result))

    def _loaded(self, seat: Seat, number: int, result: Future[Any]) -> None:
        cause = _cause(result.exception())
        if cause is None:
            seat.up = self._any_loaded = True
            self._counts["engine_restarts"] += number > 0
        else:
            self._unproven.append((seat, cause))
        if self._any_loaded:
            unproven, self._unproven = self._unproven, []
            for failed, why in unproven:
                self._lose(failed, f"did not start: {_said(why)}")
        elif len(self._unproven) == len(self._seats):  # nothing ever ran here: that is no engine's fault
            self._thread.end(self._unproven[0][1])

    def _look_after(self) -> None:
        """Find engines that hang."""
        now = time.monotonic()
        for seat in self._seats if not self._syncing else ():
            if (question := seat.question(now)) is not None:
                self._ask_core(seat, question)
            elif seat.hangs(now):
                self._lose(seat, f"did not come back from a step for {self._config.stall_timeout_s:g} s")

    def _ask_core(self, seat: Seat, question: ray.ObjectRef) -> None:
        number = seat.number
        self._thread.watch(question, lambda result: self._answered(seat, number, result))

    def _answered(self, seat: Seat, number: int, result: Future[Any]) -> None:
        if seat.number == number and seat.up and result.exception() is None:
            seat.answer(result.result())


def _cause(error: BaseException | None) -> BaseException | None:
    """What a call failed with, without Ray's wrapper."""
    return getattr(error, "cause", None) or error


def _said(error: BaseException) -> str:
    """The first line: Ray's go on for many."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _sequences(lost: Sequence[Work]) -> int:
    return sum(len(work.requests) for work in lost)
