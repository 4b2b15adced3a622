"""Reward workers on the nodes of a Ray cluster."""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megatron_dppo.errors import of_file, raise_cause
from megatron_dppo.tasks.rewards.pool import LocalVerifierPool, TimedVerifier
from megatron_dppo.tasks.rewards.verdict import Answered, Verdict
from megatron_dppo.tasks.workers.workers import START_TIMEOUT_S

_LOST = (
    ray.exceptions.RayActorError,
    ray.exceptions.ActorUnschedulableError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.GetTimeoutError,
)


class VerifierActor:
    """Runs on a node: a `LocalVerifierPool` of that machine, so that what hangs, crashes or leaks is ended there."""

    def __init__(self, verifiers: Mapping[str, TimedVerifier], folder: str, workers: int, memory_mib: int) -> None:
        self._folder, self._verifiers, self._workers, self._memory_mib = folder, verifiers, workers, memory_mib
        self._pool: LocalVerifierPool | None = None

    def verify(self, tasks: list[tuple[str, Answered]]) -> list[Verdict]:
        try:
            os.chdir(self._folder)  # the workers look for a user's functions there first
        except OSError as error:
            raise of_file(
                error,
                f"task.reward_placement=ray: {self._folder}, where the run was started, is not there on "
                f"{socket.gethostname()} ({error.strerror or error}); start it in a shared folder, or set it to local",
            ) from None
        if self._pool is None:  # here, because of an actor's constructor only the traceback comes back
            self._pool = LocalVerifierPool(self._verifiers, workers=self._workers, memory_mib=self._memory_mib)
        return self._pool.verify(tasks)


@dataclass(frozen=True)
class _Share:
    """What one node is given: numbers of the tasks, their verdicts to come, and the seconds they may take."""

    node: str
    numbers: Sequence[int]
    verdicts: Any
    patience: float


class RayVerifierPool:
    """`LocalVerifierPool` spread over the living nodes of the connected Ray, `workers` processes on each.

    With n nodes each gets every n-th answer. A node that is lost, or has not answered when its share must be over, is
    left out of the rest of the call and the others take its share. Actors start with the first call, one a
    node, and end with `close` or with the run's Ray.
    """

    def __init__(self, verifiers: Mapping[str, TimedVerifier], *, workers: int, memory_mib: int) -> None:
        self._verifiers, self._workers, self._memory_mib = dict(verifiers), workers, memory_mib
        self._actors: dict[str, Any] = {}
        self._turn = threading.Lock()
        self._waiting: deque[tuple[Sequence[tuple[str, Answered]], Future[list[Verdict]]]] = deque()

    def verify(self, tasks: Sequence[tuple[str, Answered]]) -> list[Verdict]:
        """See `LocalVerifierPool.verify`. RuntimeError also where every node was lost. What comes from other threads
        while a call is under way is the next call, all of it together: it waits for the slowest answer of this one."""
        mine: Future[list[Verdict]] = Future()
        self._waiting.append((tasks, mine))
        with self._turn:  # a node counts as lost when it is late, and would be for waiting its turn there
            if not mine.done():
                waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
                try:
                    verdicts = iter(self._verify([task for some, _ in waiting for task in some]))
                except BaseException as error:
                    for _, future in waiting:
                        future.set_exception(error)
                    raise
                for some, future in waiting:
                    future.set_result(list(islice(verdicts, len(some))))
        return mine.result()

    def _verify(self, tasks: Sequence[tuple[str, Answered]]) -> list[Verdict]:
        verdicts: dict[int, Verdict] = {}
        lost: set[str] = set()
        while waiting := [number for number in range(len(tasks)) if number not in verdicts]:
            nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] not in lost]
            if not nodes:
                raise RuntimeError(f"no node is left to verify answers on: {len(lost)} did not answer or are gone")
            for share in list(self._hand_out(tasks, waiting, nodes)):
                try:
                    answers = ray.get(share.verdicts, timeout=share.patience)
                except _LOST:
                    lost.add(share.node)
                    self._end(share.node)
                except ray.exceptions.RayTaskError as error:
                    self.close()  # what is under way elsewhere is of no use any more
                    raise_cause(error)
                else:
                    verdicts |= zip(share.numbers, answers, strict=True)
        return [verdicts[number] for number in range(len(tasks))]

    def close(self) -> None:
        """End the actors and their workers. New ones are started if this is used again."""
        for node in list(self._actors):
            self._end(node)

    def _hand_out(
        self, tasks: Sequence[tuple[str, Answered]], waiting: Sequence[int], nodes: Sequence[str]
    ) -> Iterator[_Share]:
        for first, node in enumerate(nodes):
            if numbers := waiting[first :: len(nodes)]:
                part = [tasks[number] for number in numbers]
                # If every answer hangs, each costs its limit and a new process.
                limits = sum(2 * self._verifiers[name].timeout_s for name, _ in part) / self._workers
                verdicts = self._actor(node).verify.remote(part)
                yield _Share(node, numbers, verdicts, 2 * START_TIMEOUT_S + limits)

    def _actor(self, node: str) -> Any:
        if node not in self._actors:
            here = NodeAffinitySchedulingStrategy(node, soft=False)
            placed = ray.remote(VerifierActor).options(num_cpus=0, max_restarts=0, scheduling_strategy=here)
            self._actors[node] = placed.remote(self._verifiers, os.getcwd(), self._workers, self._memory_mib)
        return self._actors[node]

    def _end(self, node: str) -> None:
        actor = self._actors.pop(node, None)
        if actor is not None and ray.is_initialized():  # with the session over the actor is gone
            ray.kill(actor)
