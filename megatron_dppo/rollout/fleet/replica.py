"""One of a fleet's engines: the engine may die and be replaced, the replica stays."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from megatron_dppo.errors import UserError
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.engine import Health, RolloutEngine
from megatron_dppo.rollout.fleet.host import THREADS, RemoteEngine
from megatron_dppo.rollout.fleet.work import Work


class Replica:
    """Belongs to the dispatcher's loop."""

    def __init__(
        self,
        make: Callable[[], RolloutEngine],
        config: RolloutConfig,
        name: str,
        options: Mapping[str, Any],
        logs: Path | None,
    ) -> None:
        self._make, self._config, self._name, self._options, self._logs = make, config, name, options, logs
        self.number = 0
        """Engines that were here before this one."""
        self.budget = config.max_tokens_in_flight or 2 * config.max_num_seqs * config.max_model_len
        self.up = False
        """Whether the engine finished loading and was not given up."""
        self.version: int | None = None
        """Of the last weights that were brought to it; None is the checkpoint it started from."""
        self.running: dict[str, Work] = {}
        self.ended: Mapping[str, int] = {}
        """Tokens of ended responses in running work, when the core last answered."""
        self._asked: float | None = None
        self._answered = 0.0
        self._begun: float | None = None
        self.engine = self._new_engine()

    @property
    def tokens(self) -> int:
        """Most tokens that the work it was given can come to."""
        return sum(work.tokens for work in self.running.values())

    def has_room(self, work: Work) -> bool:
        """Whether `work` is within its budget; whoever has nothing to do takes anything."""
        if not self.running:
            return True
        return len(self.running) < THREADS["work"] and self.tokens + work.tokens <= self.budget

    def replace(self) -> None:
        """End the engine and start another. Blocks for seconds: memory must be free before it is taken again."""
        self.engine.kill()
        self.number += 1
        self.engine = self._new_engine()

    def start_clock(self) -> None:
        """The engine is waited for from now on."""
        self._begun = time.monotonic()

    def ended_start(self) -> bool:
        """Its start-up ended, well or badly. False where that was known, or was given up."""
        waited, self._begun = self._begun is not None, None
        return waited

    def late_start(self, now: float) -> UserError | None:
        """What is wrong with an engine that has been loading for too long."""
        limit = self._config.start_timeout_s
        if self._begun is None or now - self._begun <= limit:
            return None
        return UserError(
            f"engine {self.engine.name} was not ready within rollout.start_timeout_s={limit:g} s; raise that, or look "
            "into its log"
        )

    def empty(self) -> tuple[list[Work], int]:
        """Give the engine up: the work it had, and the tokens of ended responses that are lost with it."""
        lost, tokens = list(self.running.values()), sum(self.ended.get(key, 0) for key in self.running)
        self.up, self.version = False, None
        self.running, self.ended, self._asked = {}, {}, None
        return lost, tokens

    def question(self, now: float) -> Future[Health] | None:
        """Ask the core whether it lives, once in a while where it has work."""
        pause = min(5.0, self._config.stall_timeout_s / 4)
        if not self.up or not self.running or self._asked is not None or now - self._answered < pause:
            return None
        self._asked = now
        return self.engine.ask(lambda engine: engine.alive(), "control")

    def answer(self, health: Health) -> None:
        """The core lives."""
        self._asked, self._answered, self.ended = None, time.monotonic(), health.ended

    def hangs(self, now: float) -> bool:
        """Whether the core owes an answer for too long."""
        return self._asked is not None and now - self._asked > self._config.stall_timeout_s

    def _new_engine(self) -> RemoteEngine:
        name = f"{self._name}-{self.number}"
        log = None if self._logs is None else self._logs / f"{name}.log"
        return RemoteEngine(self._make, name=name, options=self._options, log=log)


def best_for(work: Work, free: Sequence[Replica], replicas: Sequence[Replica]) -> Replica:
    """Of the free ones, the one with the fewest tokens in flight; or the one of `replicas` that all work of this
    affinity is sent to, as long as it has at most a quarter of its budget more."""
    least = min(free, key=lambda replica: replica.tokens)
    home = replicas[zlib.crc32(work.affinity.encode()) % len(replicas)]
    near = home in free and home.tokens <= least.tokens + home.budget // 4
    return home if work.affinity and near else least
