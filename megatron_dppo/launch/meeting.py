"""The nodes of a job meet before their ranks start, and again whenever these are started anew.

    node 0, which has the store                  node i
    ---------------------------                  ------
    attempt = k                            -->   says joined/k/i
    waits for joined/k/1 .. n-1
    plan/k: the ranks' store, the state    -->   waits until it sees that state
    ranks run; every node beats once a second, and whoever loses a rank or another node says failed/k
    all end their ranks
    attempt = k+1, or over                 -->   joins again, or ends with the same reason

A node that was lost and comes back finds an attempt that it had joined, says failed/k and waits for the next. Where
node 0 was lost the others wait for a new one, whose store is empty.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from megatron_dppo.errors import UserError, first_line
from megatron_dppo.launch.network import LOOPBACK, bound_store, within
from megatron_dppo.launch.rank import PROGRAM
from megatron_dppo.launch.restarts import Outcome, Restarts, say

_POLL_S, _BEAT_S = 0.2, 1.0
_FAREWELL_S = 30.0
"""Node 0 waits so long for the others to have heard the end."""
_CALL_S = timedelta(seconds=20)
_QUIET_S = 10.0
"""Who is waited for for longer is named on the terminal."""


class NodeLost(Exception):
    """This attempt is over because of what happened elsewhere."""


class JobOver(Exception):
    """There is no other attempt."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.message)
        self.outcome = outcome


@dataclass(frozen=True)
class Nodes:
    """Of the job; by default one machine, which listens on loopback."""

    count: int = 1
    number: int = 0
    head: str = LOOPBACK
    port: int = 0
    join_timeout_s: float = 300.0
    """How long the others are waited for."""
    lost_after_s: float = 120.0
    """A node that gave no sign of life for so long is lost."""


class Meeting(RendezvousHandler):
    """This node's part in it; also what torch's agent needs to start this node's ranks."""

    def __init__(self, nodes: Nodes, restarts: Restarts, *, alive: Callable[[], None] = lambda: None) -> None:
        """`alive` is asked while ranks run, and raises NodeLost where something that this node needs is gone."""
        self.nodes, self.running = nodes, False
        self.run = PROGRAM
        """Name of this start of the ranks for torch's agent."""
        self._restarts, self._alive = restarts, alive
        self._attempt = 1
        self._name = f"process {os.getpid()} of {socket.gethostname()}"
        self._store: dist.TCPStore | _Remote | None = None
        self._ranks_store: dist.TCPStore | None = None
        self._port = 0
        self._waits_for = ""
        self._lost: str | None = None
        self._over = threading.Event()
        self._seen: dict[int, tuple[bytes, float]] = {}

    # Between attempts

    def join(self) -> list[str]:
        """Wait for all nodes. Returns the overrides that the ranks get. Raises JobOver, and UserError for what another
        try would not change."""
        self._waits_for = ""
        state = self._open() if self.nodes.number == 0 else self._enter()
        self._watch()
        return ["trainer.resume=true"] if state else []

    def again(self, outcome: Outcome) -> tuple[bool, Outcome]:
        """After an attempt, with none of this node's ranks left: is there another one, and how this one or the job
        ended."""
        self._over.set()
        with suppress(RuntimeError):  # a store that is gone says nothing of what it knew
            if self._said("failed"):
                outcome = self._read("failed")
            elif self._several and self._store is not None and outcome.status:
                self._fail(outcome)
                outcome = self._read("failed")
        if outcome.status == 0:
            return False, outcome
        if self.nodes.number == 0:
            return self._decide(outcome), outcome
        return self._hear(outcome)

    @property
    def _several(self) -> bool:
        return self.nodes.count > 1

    def _open(self) -> str:
        """Node 0 begins an attempt."""
        others = range(1, self.nodes.count)
        deadline = time.monotonic() + self.nodes.join_timeout_s
        if self._store is None:
            self._store = self._bind(self.nodes.port, deadline)
        self._store.set("attempt", str(self._attempt))
        while missing := [i for i in others if not self._store.check([self._key(f"joined/{i}")])]:
            if self._said("twice"):
                outcome = _failed(self._store.get(self._key("twice")).decode())
                self._farewell(outcome)
                raise JobOver(outcome)
            if time.monotonic() > deadline:
                here = self.nodes.count - len(missing)
                names = ", ".join(map(str, missing))
                came = f"{here} of {self.nodes.count} nodes came within {self.nodes.join_timeout_s:.0f} s"
                outcome = _failed(f"{came}; missing: {names}")
                self._farewell(outcome)
                raise JobOver(outcome)
            self._say_that_it_waits(deadline, "node " + ", ".join(map(str, missing)))
            time.sleep(_POLL_S)
        state = self._restarts.begin()
        self._ranks_store = self._bind(0, deadline)
        self._port = self._ranks_store.port
        self._store.set(self._key("plan"), json.dumps({"port": self._port, "state": state}))
        return state

    def _bind(self, port: int, deadline: float) -> dist.TCPStore:
        while True:
            try:
                return bound_store(self.nodes.head, port)
            except OSError as error:  # a pod's name takes a while to have its address, an old socket to go
                if not self._several or time.monotonic() > deadline:
                    raise UserError(
                        f"HEAD_ADDRESS={self.nodes.head}: node 0 cannot listen there on port {port}: {error}; it must "
                        "be an address of node 0, and the port free"
                    ) from error
            time.sleep(1.0)

    def _enter(self) -> str:
        """Another node joins the attempt that node 0 began."""
        deadline = time.monotonic() + self.nodes.join_timeout_s
        while True:
            if time.monotonic() > deadline:
                where = f"node 0 at {self.nodes.head}:{self.nodes.port}"
                raise JobOver(_failed(f"{where} did not begin within {self.nodes.join_timeout_s:.0f} s"))
            try:
                self._connect(deadline)
                plan = self._join_once(deadline)
                if plan is None:
                    continue
                self._port = plan["port"]
                self._ranks_store = dist.TCPStore(
                    self.nodes.head, self._port, is_master=False, wait_for_workers=False, timeout=timedelta(minutes=5)
                )
            except RuntimeError:  # of the store: node 0 is gone, and may come back
                self._store = None
                time.sleep(1.0)
                continue
            return self._restarts.see(str(plan["state"]))

    def _say_that_it_waits(self, deadline: float, whom: str) -> None:
        """After a while, and again when there are others."""
        if time.monotonic() > deadline - self.nodes.join_timeout_s + _QUIET_S and self._waits_for != whom:
            self._waits_for = whom
            say(f"waiting for {whom}, JOIN_TIMEOUT_S={self.nodes.join_timeout_s:.0f} at most")

    def _connect(self, deadline: float) -> None:
        while self._store is None and time.monotonic() < deadline:
            self._say_that_it_waits(deadline, f"node 0 at {self.nodes.head}:{self.nodes.port}")
            with suppress(OSError):  # torch's own attempts are loud
                socket.create_connection((self.nodes.head, self.nodes.port), timeout=5).close()
                self._store = _Remote(self.nodes)
                return
            time.sleep(1.0)

    def _join_once(self, deadline: float) -> dict[str, Any] | None:
        """The plan of the attempt that is open; None where it was over before it began for this node."""
        store = self._store
        if store is None:
            return None
        while not store.check(["attempt"]):
            time.sleep(_POLL_S)
        self._attempt = int(store.get("attempt"))
        store.set(self._key(f"is/{self.nodes.number}"), self._name)
        if store.add(self._key(f"joined/{self.nodes.number}"), 1) > 1 and store.check([self._key("plan")]):
            self._fail(_failed(f"node {self.nodes.number} was lost, and came back"))
        while time.monotonic() < deadline:
            if (other := store.get(self._key(f"is/{self.nodes.number}")).decode()) != self._name:
                why = (
                    f"NODE_RANK={self.nodes.number} was given twice, to {self._name} and {other}: each node has its own"
                )
                store.set(self._key("twice"), why)
                raise UserError(why)
            if self._said("over"):
                store.set(self._key(f"heard/{self.nodes.number}"), "1")
                raise JobOver(self._read("over"))
            if int(store.get("attempt")) != self._attempt:
                return None
            if self._said("plan") and not self._said("failed"):
                plan: dict[str, Any] = json.loads(store.get(self._key("plan")))
                return plan
            time.sleep(_POLL_S)
        return None

    def _decide(self, outcome: Outcome) -> bool:
        """Node 0 says what is next."""
        again = self._restarts.again(outcome)
        if again:
            self._attempt += 1
            return True
        self._farewell(outcome)
        return False

    def _farewell(self, outcome: Outcome) -> None:
        """Node 0 leaves when the others that live know how it ends."""
        if self._several and self._store is not None:
            self._store.set(self._key("over"), json.dumps(vars(outcome)))
            end = time.monotonic() + _FAREWELL_S
            heard = [f"heard/{i}" for i in range(1, self.nodes.count) if self._said(f"joined/{i}")]
            while time.monotonic() < end and not all(self._said(name) for name in heard):
                time.sleep(_POLL_S)

    def _hear(self, outcome: Outcome) -> tuple[bool, Outcome]:
        """Another node learns what is next. Where node 0 is gone, that is the next one's attempt."""
        end = time.monotonic() + self.nodes.join_timeout_s
        with suppress(RuntimeError):
            while self._store is not None and time.monotonic() < end:
                if self._said("over"):
                    self._store.set(self._key(f"heard/{self.nodes.number}"), "1")
                    return False, self._read("over")
                if int(self._store.get("attempt")) != self._attempt:
                    return True, outcome
                time.sleep(_POLL_S)
        self._store = None
        return outcome.status == 1, outcome

    # During an attempt

    def _watch(self) -> None:
        """From now on this node gives signs of life and looks for those of the others."""
        self._lost, self._over = None, threading.Event()
        if self._store is not None and self._several:
            others = range(1, self.nodes.count) if self.nodes.number == 0 else range(1)
            self._seen = {i: (b"", time.monotonic()) for i in others}
            # A connection of its own: while the network stands still its calls do not return.
            store = self._store.clone()  # type: ignore[union-attr]  # torch's stubs lack it
            threading.Thread(target=self._beat, args=(store, self._over), daemon=True, name="nodes").start()

    def _beat(self, store: dist.TCPStore, over: threading.Event) -> None:
        count = 0
        try:
            while not over.wait(_BEAT_S):
                count += 1
                store.set(self._key(f"beat/{self.nodes.number}"), str(count))
                for i in self._seen:
                    key = self._key(f"beat/{i}")
                    beat = store.get(key) if store.check([key]) else b""
                    if beat != self._seen[i][0]:
                        self._seen[i] = (beat, time.monotonic())
                if store.check([self._key("failed")]):
                    self._lost = "another node failed"  # `again` reads how
        except RuntimeError as error:
            if not over.is_set():  # the kernel gives a vanished node up after 15 minutes: another one is node 0 by then
                self._lost = f"node 0 was lost ({first_line(error)})"

    @contextmanager
    def with_ranks(self) -> Iterator[None]:
        """Inside, this node has ranks, which may finish a step."""
        self.running = True
        try:
            yield
        finally:
            self.running = False

    def num_nodes_waiting(self) -> int:
        """torch's agent asks ten times a second. Raises NodeLost."""
        self._alive()
        if self._several:
            if self._lost is not None:
                raise NodeLost(self._lost)
            limit = self.nodes.lost_after_s
            for node, (_, at) in self._seen.items():
                if time.monotonic() - at > limit:
                    self._store = self._store if self.nodes.number == 0 else None  # it would not answer
                    raise NodeLost(f"node {node} gave no sign of life for {limit:.0f} s")
        return 0

    # The store's keys

    def _key(self, name: str) -> str:
        return f"{self._attempt}/{name}"

    def _said(self, name: str) -> bool:
        return self._store is not None and self._store.check([self._key(name)])

    def _fail(self, outcome: Outcome) -> None:
        """The first to say so is heard."""
        assert self._store is not None
        self._store.compare_set(self._key("failed"), "", json.dumps(vars(outcome)))

    def _read(self, name: str) -> Outcome:
        assert self._store is not None
        return Outcome(**json.loads(self._store.get(self._key(name))))

    # What torch's agent asks

    def next_rendezvous(self) -> RendezvousInfo:
        assert self._ranks_store is not None
        store = _AgentStore("agent", self._ranks_store)
        store.meanwhile, store.limit = self.num_nodes_waiting, self.nodes.lost_after_s
        return RendezvousInfo(
            store, self.nodes.number, self.nodes.count, RendezvousStoreInfo(self.nodes.head, self._port)
        )

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return self.run

    def get_run_id(self) -> str:
        return self.run

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """There is nobody else to tell."""

    def shutdown(self) -> bool:
        return True


class _Remote:
    """Node 0's store on another node. A call that is not answered within the time after which a node is lost raises
    `DistNetworkError`, as one does whose connection is closed."""

    def __init__(self, nodes: Nodes) -> None:
        self._limit = nodes.lost_after_s
        self._store = within(
            self._limit,
            lambda: dist.TCPStore(nodes.head, nodes.port, is_master=False, wait_for_workers=False, timeout=_CALL_S),
        )

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: within(self._limit, lambda: getattr(self._store, name)(*arguments))


class _AgentStore(dist.PrefixStore):
    """Where the agents of all nodes wait for each other, at the start, and at the end for those whose ranks take
    longer: while the attempt lasts, and no longer."""

    meanwhile: Callable[[], object]
    limit: float

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        while not within(self.limit, lambda: self.check(keys)):
            self.meanwhile()
            time.sleep(_POLL_S)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return bytes(super().get(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]


def _failed(why: str) -> Outcome:
    return Outcome(1, f"{PROGRAM}: failed: {why}", lost=True)
