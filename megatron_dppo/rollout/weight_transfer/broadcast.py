"""Weights to engines on GPUs of their own: each owner broadcasts what it has to all workers that need it.

```
rank 0        begin_update ──► engines       receive_group ──► engines: workers load bucket i
every owner   writes buckets 0 and 1 ┐       sends bucket i, writes bucket i + 2 when bucket i has left
all ranks     could all write? ──────┘       did all arrive? else once more without the engines that failed, in a new
                                             communicator

where the communicator is not of the engines that have begun, between the two:
rank 0        agree ──► engines: workers join ┐
every owner   joins ──────────────────────────┴─ all ranks settle: did everybody join?
```
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_dppo.checkpoint.weight_buckets import WeightBuckets
from megatron_dppo.launch.network import own_address
from megatron_dppo.rollout.engine import EngineClient, Rendezvous, RolloutEngine, TransferTerms
from megatron_dppo.rollout.weight_transfer.group import GroupClosed, MeetingStore, WeightGroup
from megatron_dppo.rollout.weight_transfer.manifest import Packed, gathered
from megatron_dppo.rollout.weight_transfer.recipients import Pending, Recipients, WeightSender

_ATTEMPTS = 3


class BroadcastSender(WeightSender):
    """One communicator (NCCL, or gloo on CPUs) of the trainer ranks that own weights and of all workers; and where the
    workers of an engine divide the experts, one for each share: of the ranks that own it and the worker of each engine
    that needs it, so that shares travel side by side.

    They are kept from sync to sync, and made anew when the engines are others or when one broke. An engine that dies
    in the middle breaks them for all: the sync is then repeated with those that still answer, and when it breaks again,
    without the one that failed first. Memory: two buckets on every owner and every worker.
    """

    def __init__(
        self,
        buckets: WeightBuckets,
        device: torch.device,
        *,
        workers_per_engine: int,
        timeout_s: float,
        control: dist.ProcessGroup | None = None,
    ) -> None:
        """
        control  of all ranks, for what is no weight. None: the world
        """
        self._buckets, self._device, self._control = buckets, device, control
        self._workers, self._timeout = workers_per_engine, timeout_s
        self._rank = dist.get_rank()
        self._owners = {rank: number for number, rank in enumerate(buckets.owners)}
        """Number in the communicator of each rank that sends."""
        self._meeting: MeetingStore | None = None
        self._group: WeightGroup | None = None
        self._members: tuple[str, ...] = ()
        """Whom the communicator has."""
        self._told: set[str] = set()
        """Engines that know the layouts."""
        senders = {share: buckets.owners_of(share) for share in buckets.shares} | {None: buckets.owners}
        self._mine = [one for one in enumerate(buckets.layouts) if self._rank in senders[one[1].share]]
        """Number and layout of each bucket on whose way this rank is."""
        self._room: list[torch.Tensor] = []
        """The first of them."""
        self._fell: list[str] = []
        """Engines that failed since `begin`, in that order."""
        self._packed = Packed()
        self._sums: dict[int, int] = {}
        """What `send` returns."""

    def begin(self, version: int, to: Recipients | None) -> None:
        """See `WeightSender.begin`. Raises, on every rank, where one could not write its first buckets."""
        begun = to.ask(lambda engine: engine.begin_update(version)) if to is not None else None
        self._fell, size, error = [], self._buckets.largest, None
        try:
            if not self._room:
                self._room = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in self._mine[:2]]
            for (index, _), payload in zip(self._mine, self._room, strict=False):
                self._buckets.write(index, payload)
        except Exception as failure:
            error = failure
        try:
            self._settled(error)
        finally:
            if to is not None:
                to.wait(begun)

    def send(self, version: int, to: Recipients | None) -> dict[int, int]:
        """See `WeightSender.send`. Raises what a rank failed with where it was not the communicator that broke."""
        for left in reversed(range(_ATTEMPTS)):
            before = set(to.errors) if to else set()
            error = self._attempt(version, to)
            if self._settled(error):
                break
            self._leave()
            if left:
                self._begin_again(version, to, before, blame=left == 1)
            if not left or not self._from_controller(bool(to and to.engines)):
                break
        self._room = []
        return self._sums

    def close(self) -> None:
        """Leave the communicator."""
        self._leave()

    def _attempt(self, version: int, to: Recipients | None) -> Exception | None:
        """One try; what this rank, or on the controller an engine, failed with."""
        terms = self._from_controller(self._terms(to) if to is not None and not self._stands(to) else None)
        error: Exception | None = None
        if terms is not None:
            pending = self._invite(to, terms) if to is not None else None
            try:
                self._join(terms)
            except Exception as failure:
                error = failure
            error = _first(error, to, pending)
            if to is not None and pending is not None:
                self._told |= pending.keys() - to.errors.keys()
            if not self._settled(error):
                return error or GroupClosed("others did not join")
        receiving = self._ask(to, lambda _: lambda one: one.receive_group(version)) if to is not None else None
        mine: dict[int, int] = {}
        try:
            if self._group is not None:
                self._broadcast(self._group, to, receiving)
                mine = self._packed.take()
        except Exception as failure:
            error = failure
            if self._group is not None:
                self._group.give_up()
        self._sums = gathered(mine, self._control)  # while the engines' answers are on their way
        return _first(error, to, receiving, 2 * self._timeout)

    def _ask(
        self, to: Recipients, call_for: Callable[[EngineClient], Callable[[RolloutEngine], None]]
    ) -> Pending[None]:
        pending = to.ask_each(call_for)
        for name, future in pending.items():
            future.add_done_callback(partial(_note, self._fell, name))
        return pending

    def _begin_again(self, version: int, to: Recipients | None, before: set[str], *, blame: bool) -> None:
        """`begin`, with all engines: where it broke, all that took part failed. To blame are those that do not answer
        now; with `blame`, if all do, who was the first to fail, unless it is alone. `before`: who had failed before."""
        if to is None:
            self.begin(version, to)
            return
        failed, fell = {name: to.errors[name] for name in to.errors.keys() - before}, self._fell
        to.forgive(failed)
        self.begin(version, to)
        if blame and fell and len(to.engines) > 1 and failed.keys().isdisjoint(to.errors):
            to.fail(fell[0], failed[fell[0]])

    def _stands(self, to: Recipients) -> bool:
        """Whether there is a communicator with these engines."""
        members = tuple(engine.name for engine in to.engines)
        return self._group is not None and not self._group.closed and members == self._members

    def _terms(self, to: Recipients) -> tuple[Rendezvous, tuple[str, ...]]:
        """Of a new communicator."""
        members = tuple(engine.name for engine in to.engines)
        self._meeting = self._meeting or MeetingStore(own_address())
        owners, workers = self._owners, range(len(self._owners), len(self._owners) + self._workers * len(members))
        shares = tuple(
            (*(owners[rank] for rank in self._buckets.owners_of(share)), *workers[share :: self._workers])
            for share in self._buckets.shares
        )
        return self._meeting.next(workers.stop, self._timeout, shares), members

    def _invite(self, to: Recipients, terms: tuple[Rendezvous, tuple[str, ...]]) -> Pending[None]:
        first = {engine.name: len(self._owners) + self._workers * i for i, engine in enumerate(to.engines)}

        def invitation(engine: EngineClient) -> Callable[[RolloutEngine], None]:
            invited = TransferTerms(
                layouts=None if engine.name in self._told else self._buckets.layouts,
                group=terms[0],
                first_rank=first[engine.name],
                source_rank=self._owners,
            )
            return lambda one: one.agree(invited)

        return self._ask(to, invitation)

    def _join(self, terms: tuple[Rendezvous, tuple[str, ...]]) -> None:
        self._leave()
        where, self._members = terms
        if self._rank in self._owners:
            self._group = WeightGroup(where, self._owners[self._rank], self._device)

    def _broadcast(self, group: WeightGroup, to: Recipients | None, receiving: Pending[None] | None) -> None:
        """Send every bucket: one is being written while the one before it is on its way."""
        under_way: list[list[Any]] = [[], []]
        for turn, (index, layout) in enumerate(self._mine):
            payload = self._room[turn % 2]
            if turn >= len(self._room):  # `begin` wrote the first
                group.wait(under_way[turn % 2])
                self._buckets.write(index, payload)
            under_way[turn % 2] = [
                group.broadcast(payload[part.start : part.stop], self._owners[part.source], layout.share)
                for part in layout.segments
            ]
            self._packed.note(index, layout, payload)  # behind, or the bucket would wait for its checksum
        group.wait([*under_way[0], *under_way[1]])
        group.finish(lambda: to is not None and receiving is not None and to.broken(receiving))

    def _leave(self) -> None:
        if self._group is not None:
            self._group.abort()  # not shutdown: a peer may be gone
            self._group = None

    def _settled(self, error: Exception | None) -> bool:
        """Whether no rank failed. Raises, on every rank, where one failed by itself."""
        found: list[tuple[str, bool]] = [("", False)] * dist.get_world_size()
        mine = "" if error is None else f"{type(error).__name__}: {error}"
        dist.all_gather_object(found, (mine, isinstance(error, GroupClosed)), group=self._control)
        for rank, (text, broken) in enumerate(found):
            if text and not broken:
                self._leave()
                self._room = []
                raise RuntimeError(f"rank {rank} failed in a weight broadcast: {text}") from error
        return not any(text for text, _ in found)

    def _from_controller(self, value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._control)
        return box[0]


def _note(fell: list[str], name: str, done: Future[None]) -> None:
    if done.exception() is not None:
        fell.append(name)


def _first(
    error: Exception | None, to: Recipients | None, pending: Pending[None] | None, timeout_s: float | None = None
) -> Exception | None:
    """Wait for the engines; this rank's own error before one of theirs."""
    if to is None or pending is None:
        return error
    to.wait(pending, timeout_s=timeout_s)
    failed = [name for name in pending if name in to.errors]
    return error or (GroupClosed(f"{failed[0]}: {to.errors[failed[0]]}") if failed else None)
