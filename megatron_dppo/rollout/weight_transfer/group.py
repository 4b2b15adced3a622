"""One communicator of the trainer ranks that own weights and of every engine worker: NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from megatron_dppo.launch.network import bound_store, within
from megatron_dppo.launch.nodes import environment
from megatron_dppo.rollout.engine import Rendezvous

_PATIENCE = 10.0
"""torch's own time limit is this many times ours: ours aborts one communicator, torch's ends the process."""
_POLL_S = 0.0001
_ASK_S = 0.5
"""How often a waiting member asks whether others gave up."""


class GroupClosed(RuntimeError):
    """A communicator broke or was given up; what was under way on it did not arrive."""


class MeetingStore:
    """The store at which communicators meet, kept by the controller for as long as it syncs weights."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._store = bound_store(host)
        self._number = 0

    def next(self, size: int, timeout_s: float, shares: Sequence[Sequence[int]] = ()) -> Rendezvous:
        """Terms of a new communicator of `size` members; `shares` as in `Rendezvous`."""
        self._number += 1
        return Rendezvous(self._host, self._store.port, f"weights-{self._number}", size, timeout_s, shares)


class WeightGroup:
    """A communicator outside torch's default process group, and those of the shares that this member is in. Broadcasts
    are asynchronous; `finish` waits for them, for at most the rendezvous' timeout, and aborts all when that has
    passed."""

    def __init__(self, where: Rendezvous, rank: int, device: torch.device) -> None:
        """Blocks until all members have come and are connected. Raises `GroupClosed` where some are not within the
        timeout, all parts together."""
        self._device, self._timeout = device, where.timeout_s
        self._end = time.monotonic() + where.timeout_s
        self.closed = False
        patience = timedelta(seconds=where.timeout_s)
        self._members: dict[int | None, Sequence[int]] = {None: range(where.size)}
        self._members |= {share: members for share, members in enumerate(where.shares) if rank in members}
        self._groups: dict[int | None, Any] = {}
        try:
            store = dist.TCPStore(where.host, where.port, is_master=False, timeout=self._left())
            self._meeting = dist.PrefixStore(where.key, store)
            self._meeting.set(f"here-{rank}", "1")
            self._meeting.wait([f"here-{member}" for member in range(where.size)], self._left())
            for share, members in self._members.items():  # in one order on every member: gloo's wait for each other
                own = dist.PrefixStore(str(share), self._meeting)
                self._groups[share] = self._communicator(own, members.index(rank), len(members), patience)
            self._connect()
        except (RuntimeError, TimeoutError) as error:
            self.abort()
            limit = f"within rollout.sync_timeout_s={where.timeout_s:g}"
            raise GroupClosed(
                f"not all {where.size} members of a weight broadcast came together {limit}: {error}"
            ) from error

    def _communicator(self, store: dist.Store, rank: int, size: int, patience: timedelta) -> Any:
        if self._device.type != "cuda":
            gloo = dist.ProcessGroupGloo(store, rank, size, self._left())
            gloo.set_timeout(patience)
            return gloo
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _PATIENCE * patience
        options.is_high_priority_stream = True  # else a bucket waits until copies of another one leave the SMs
        # torch reads this when a group is made: a failed collective then aborts the communicator and leaves the process
        # alone; the error shows in `finish`.
        with environment({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}):
            return dist.ProcessGroupNCCL(store, rank, size, options)

    def _left(self) -> timedelta:
        """Of the time in which all members must be connected. Raises TimeoutError where there is none."""
        seconds = self._end - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("no time is left")
        return timedelta(seconds=seconds)

    def _connect(self) -> None:
        """A byte over every communicator. NCCL makes its connections in the first call, which has no time limit and
        waits for ever for a member that died before: here, in a thread that is then left behind, and not in the middle
        of a sync. That NCCL's abort returns while that thread is in there was not seen yet."""

        def speak() -> None:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # each thread has one of its own
            for share, members in self._members.items():
                word = torch.zeros(1, dtype=torch.uint8, device=self._device)
                self.broadcast(word, members[0], share).wait()
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()

        within(self._left().total_seconds(), speak)

    def broadcast(self, part: torch.Tensor, source: int, share: int | None = None) -> Any:
        """Start sending `part` (uint8) from member `source` to all, or to all of a share; hand what this returns to
        `wait`."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = self._members[share].index(source), 0
        return self._groups[share].broadcast([part], options)

    def wait(self, works: Sequence[Any]) -> None:
        """Let what comes after be ordered after these (on a GPU the current stream's work, on a CPU this thread's).
        Raises `GroupClosed` where gloo says that a member is gone or late."""
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            self.abort()
            raise GroupClosed(f"the weight broadcast broke: {error}") from error

    def finish(self, give_up: Callable[[], bool] = lambda: False) -> None:
        """Wait until the device has done all that was started. Raises `GroupClosed` when the timeout has passed, when
        `give_up` (asked now and then) says so, or when another member gave up; the communicator is then aborted."""
        if self._device.type != "cuda":
            return  # gloo's works were waited for
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self._device))
        begun = asked = time.monotonic()
        while not done.query():
            now = time.monotonic()
            if now - asked > _ASK_S:
                asked = now
                if self._meeting.check(["given up"]):
                    self._break("another member gave up")
                if give_up():
                    self.give_up()
                    self._break("an engine failed")
            if now - begun > self._timeout:
                self._break(f"it did not finish within rollout.sync_timeout_s={self._timeout:g}")
            time.sleep(_POLL_S)

    def _break(self, why: str) -> NoReturn:
        self.abort()
        raise GroupClosed(f"the weight broadcast was aborted: {why}")

    def give_up(self) -> None:
        """`abort`, of which members that wait in `finish` hear at once."""
        with suppress(RuntimeError):  # the controller may be gone, and the store with it
            self._meeting.set("given up", "1")
        self.abort()

    def abort(self) -> None:
        """End all communicators; broadcasts under way fail on every member. Idempotent."""
        if not self.closed:
            self.closed = True
            for group in self._groups.values():
                group.abort()
