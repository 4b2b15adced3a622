"""Gives work to engines and takes it back from those that fail.

```
a step's thread ── wait_for(ticket) ──┐                      ┌─► replica 0 ── ask ──► engine
an evaluation ──── wait_for(ticket) ──┼─► waiting, assigned ─┼─► replica 1 ── ask ──► engine
  each waits for its ticket ◄─────────┘   on one event loop  └─► ...
the training ranks ── hold_for(version) ─► no work is given out; waits until nobody is at work (or cuts it)
                      synced ───────────► work goes on
```
What an engine answers, a start that ended and a replaced engine come back to the loop as events. Several times a second
it looks for engines that hang or do not come up.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

import ray

from megatron_dppo.errors import UserError, typed_line
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.engine import (
    EngineClient,
    EngineClosed,
    FleetStatus,
    GenerationTimeout,
    Health,
    MalformedOutput,
)
from megatron_dppo.rollout.event_loop import EventLoop
from megatron_dppo.rollout.fleet.failures import Failures
from megatron_dppo.rollout.fleet.host import RemoteEngine, future_of
from megatron_dppo.rollout.fleet.replica import Replica, best_for
from megatron_dppo.rollout.fleet.store import sampled_columns
from megatron_dppo.rollout.fleet.work import Ticket, Work
from megatron_dppo.rollout.stored import column_names

_MOST_TIMEOUTS = 2
_TICK_S = 0.2

COUNTED = ("engine_failures", "engine_restarts", "requeued_sequences", "lost_tokens", "request_timeouts",
           "dropped_sequences")  # fmt: skip

logger = logging.getLogger(__name__)


class Dispatcher:
    """The replicas and the work that waits for them. One event loop alone changes them, event by event; what is not
    said to be for any thread runs there."""

    def __init__(self, replicas: Sequence[Replica], config: RolloutConfig, store: Any, store_name: str) -> None:
        self._replicas, self._config = list(replicas), config
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
        self._unproven: list[tuple[Replica, BaseException]] = []
        """First engines of their replicas that failed to start before any came up, and why."""
        self._failures = Failures(config.max_engine_failures)
        self._counts: Counter[str] = Counter()
        self._replacing: list[threading.Thread] = []
        self._end_reason: BaseException | None = None
        """Why nothing more happens here."""
        self._changed = asyncio.Event()
        """Set, and another one in its place, after every event."""
        self._loop = EventLoop("engine-fleet")
        self._loop.run(self._begin())

    # For any thread

    def ask[T](self, question: Callable[[], T]) -> T:
        """Call a function on the loop and wait. Raises what it raised, or what ended this object before."""
        return self._loop.run(self._answer(question))

    def wait_for(self, ticket: Ticket, arrived: Callable[[Any], None] = lambda result: None) -> list[Any]:
        """Have a ticket's work done; see `Ticket.wait`."""
        self.ask(lambda: self._submit(ticket))
        try:
            return ticket.wait(arrived)
        finally:
            self._put(lambda: self._leave(ticket))

    def wait_until_up(self) -> list[RemoteEngine]:
        """All engines, once they have loaded; raises what ended this object before that."""

        async def loaded() -> list[RemoteEngine]:
            await self._until(lambda: all(replica.up for replica in self._replicas))
            return self.members()

        return self._loop.run(loaded())

    def hold_for(self, version: int, *, drain: bool) -> list[RemoteEngine]:
        """See `RolloutFleet.members_to_sync`."""

        async def held() -> list[RemoteEngine]:
            await self._until(lambda: all(replica.up or replica.number > 0 for replica in self._replicas))
            self._held, self._current = True, version
            await self._until(lambda: any(replica.up for replica in self._replicas))
            if drain:
                await self._until(lambda: not any(replica.running for replica in self._replicas))
                await self._until(lambda: any(replica.up for replica in self._replicas))
            self._syncing = True
            return self.members()

        return self._loop.run(held())

    def close(self) -> list[RemoteEngine]:
        """End the loop; returns the engines, for whom this was the last owner. The second time there are none."""
        if not self._loop.closed:
            with suppress(EngineClosed):
                self._loop.run(self._end_now(EngineClosed("the engines are closed")))
            self._loop.stop()
        for thread in self._replacing:
            thread.join()
        replicas, self._replicas = self._replicas, []
        return [replica.engine for replica in replicas]

    # On the loop

    def members(self) -> list[RemoteEngine]:
        return [replica.engine for replica in self._replicas if replica.up]

    def behind(self) -> list[RemoteEngine]:
        return [replica.engine for replica in self._replicas if replica.up and replica.version != self._current]

    def synced(self, version: int, members: Sequence[EngineClient], failed: Mapping[str, Exception]) -> None:
        names = {member.name for member in members}
        why = {name: f"did not get weight version {version}: {typed_line(error)}" for name, error in failed.items()}
        if (end := self._failures.of_sync(names, why, version)) is not None:
            return self._end(end)
        for replica in self._replicas:
            if replica.engine.name not in names or not replica.up:
                continue
            replica.version = version
            if replica.engine.name in why:
                self._lose(replica, why[replica.engine.name])
        self._held = self._syncing = False

    def begin_run(self) -> None:
        self._failures.begin_run()
        self._counts.clear()

    def take_counts(self) -> dict[str, float]:
        taken = {f"rollout/{name}": float(self._counts[name]) for name in COUNTED}
        self._counts.clear()
        return taken

    def status(self) -> FleetStatus:
        return FleetStatus(
            engines=len(self._replicas),
            ready=sum(replica.up for replica in self._replicas),
            asked=sum(ticket.asked for ticket in self._tickets),
            answered=sum(ticket.answered for ticket in self._tickets),
        )

    def _put(self, event: Callable[[], None]) -> None:
        """Have something happen; for any thread. An error in an event is the end."""
        self._loop.call(self._happen, event)

    def _happen(self, event: Callable[[], None] | None = None) -> None:
        if self._end_reason is not None:
            return
        try:
            if event is not None:
                event()
            self._look_after()
            self._assign()
        except BaseException as error:
            self._end(error)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _answer[T](self, question: Callable[[], T]) -> T:
        if self._end_reason is not None:
            raise self._end_reason
        try:
            return question()
        finally:
            self._happen()

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds. Raises why nothing more happens."""
        while self._end_reason is None and not condition():
            await self._changed.wait()
        if self._end_reason is not None:
            raise self._end_reason

    def _watch(self, future: Future[Any], then: Callable[[Future[Any]], None]) -> None:
        """Have `then` called when a result is there."""
        future.add_done_callback(lambda result: self._put(partial(then, result)))

    async def _begin(self) -> None:
        for replica in self._replicas:
            self._expect(replica)
        self._clock = asyncio.ensure_future(self._tick())

    async def _tick(self) -> None:
        """Things happen, or are seen not to, also when nobody asks for anything."""
        while self._end_reason is None:
            await asyncio.sleep(_TICK_S)
            self._happen()

    def _end(self, reason: BaseException) -> None:
        """The last event."""
        if self._end_reason is None:
            self._end_reason = reason
            for ticket in self._tickets:
                ticket.fail(reason)
            self._notify()

    async def _end_now(self, reason: BaseException) -> None:
        self._end(reason)
        await asyncio.sleep(0)  # whoever waits in `_until` hears of it before the loop is stopped

    def _submit(self, ticket: Ticket) -> None:
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
        for replica in self._replicas:
            for work in replica.running.values():
                if work.ticket is ticket:
                    given_up.append(work)
                    self._take_back(replica, work)
        self._counts["dropped_sequences"] += sum(len(work.requests) for work in given_up)

    def _assign(self) -> None:
        """First come, first served."""
        while self._waiting and not self._held:
            work = self._waiting[0]
            free = [r for r in self._replicas if r.up and r.version == self._current and r.has_room(work)]
            if not free:
                return
            self._give(best_for(work, free, self._replicas), self._waiting.popleft())

    def _give(self, replica: Replica, work: Work) -> None:
        key, requests, ticket = work.key, work.requests, work.ticket
        sampling, training, store, groups = ticket.sampling, ticket.training, self._store_name, ticket.layer_groups
        columns: list[ray.ObjectRef] = []
        result: Future[Any]
        if ticket.stored:
            handle, *columns = replica.engine.ask_for_parts(
                lambda engine: sampled_columns(engine, requests, sampling, store=store, key=key, layer_groups=groups),
                1 + len(column_names(groups)),
            )
            result = future_of(handle)
        else:
            known = [request.known for request in requests]
            result = replica.engine.ask(  # what is known stays where the engine lives
                lambda engine: engine.generate(requests, sampling, training=training, call=key).beyond(known), "work"
            )
        replica.running[key] = work
        self._watch(result, lambda done: self._finished(replica, key, columns, done))

    def _take_back(self, replica: Replica, work: Work) -> None:
        key = work.key
        replica.engine.ask(lambda engine: engine.abandon(key), "control")

    def _finished(self, replica: Replica, key: str, columns: list[ray.ObjectRef], result: Future[Any]) -> None:
        work = replica.running.get(key)
        if work is None:  # the engine was given up meanwhile, and its work is somebody else's
            return
        ticket, error = work.ticket, result.exception()
        asked = tuple(request.request_id for request in work.requests)
        if error is None and result.result().request_ids != asked:
            error = MalformedOutput(f"asked for {asked[0]} and {len(asked) - 1} more, others were answered")
        if ticket.closed or error is None or isinstance(error, UserError | GenerationTimeout):
            del replica.running[key]
        if ticket.closed:
            if ticket in self._tickets:  # enough came already, and who waited for it has not left yet
                self._counts["dropped_sequences"] += len(work.requests)
            return
        if error is None:
            ticket.deliver(work, (result.result(), self._known(work, columns)) if ticket.stored else result.result())
        elif isinstance(error, UserError):
            ticket.fail(error)
        elif isinstance(error, GenerationTimeout):
            self._counts["request_timeouts"] += 1
            work.timeouts += 1
            if work.timeouts == _MOST_TIMEOUTS:
                ticket.fail(error)
            else:
                self._requeue([work])
        else:
            self._lose(replica, f"failed: {typed_line(error)}")

    def _known(self, work: Work, columns: list[ray.ObjectRef]) -> ray.ObjectRef:
        """Make the store know a result; resolves when it does."""
        return self._store.put.remote(work.key, dict(zip(column_names(work.ticket.layer_groups), columns, strict=True)))

    def _requeue(self, lost: Sequence[Work]) -> None:
        for work in reversed(lost):
            if not work.ticket.closed:
                work.again()
                self._waiting.appendleft(work)
                self._counts["requeued_sequences"] += len(work.requests)

    def _lose(self, replica: Replica, reason: str) -> None:
        """Give up the engine of a replica: its work goes to the others, and another engine takes the replica."""
        if self._end_reason is not None:
            return
        lost, tokens = replica.empty()
        self._counts["engine_failures"] += 1
        self._counts["lost_tokens"] += tokens
        self._requeue(lost)
        told = f"engine {replica.engine.name} {reason}"
        if (end := self._failures.another(told)) is not None:
            return self._end(end)
        logger.warning("%s; another one takes its place, %d sequences are sampled anew; %s",
                       told, _sequences(lost), self._failures.so_far)  # fmt: skip
        thread = threading.Thread(target=self._replace, args=(replica,), daemon=True)
        self._replacing.append(thread)
        thread.start()

    def _replace(self, replica: Replica) -> None:
        """On a thread of its own, since it takes seconds."""
        try:
            replica.replace()
        except Exception as error:  # nobody joins this thread before the end, and the replica would stay empty unseen
            self._put(partial(self._end, error))
            return
        self._put(lambda: self._expect(replica))

    def _expect(self, replica: Replica) -> None:
        number = replica.number
        replica.start_clock()
        self._watch(replica.engine.started, lambda result: self._started(replica, number, result.exception()))

    def _started(self, replica: Replica, number: int, error: BaseException | None) -> None:
        """An engine came up or failed to. What is heard of one that was given up meanwhile does not count."""
        if replica.number != number or not replica.ended_start():
            return
        if error is None:
            replica.up = self._any_loaded = True
            self._counts["engine_restarts"] += number > 0
        else:
            self._unproven.append((replica, error))
        if self._any_loaded:
            unproven, self._unproven = self._unproven, []
            for failed, why in unproven:
                self._lose(failed, f"did not start: {typed_line(why)}")
        elif len(self._unproven) == len(self._replicas):  # nothing ever ran here: that is no engine's fault
            self._end(self._unproven[0][1])

    def _look_after(self) -> None:
        """Find engines that do not come up, and those that hang."""
        now = time.monotonic()
        for replica in self._replicas:
            if (late := replica.late_start(now)) is not None:
                self._started(replica, replica.number, late)
        for replica in self._replicas if not self._syncing else ():
            if (question := replica.question(now)) is not None:
                self._ask_core(replica, question)
            elif replica.hangs(now):
                self._lose(replica, f"did not come back from a step for {self._config.stall_timeout_s:g} s")

    def _ask_core(self, replica: Replica, question: Future[Health]) -> None:
        number = replica.number
        self._watch(question, lambda result: self._answered(replica, number, result))

    def _answered(self, replica: Replica, number: int, result: Future[Any]) -> None:
        if replica.number == number and replica.up and result.exception() is None:
            replica.answer(result.result())


def _sequences(lost: Sequence[Work]) -> int:
    return sum(len(work.requests) for work in lost)
