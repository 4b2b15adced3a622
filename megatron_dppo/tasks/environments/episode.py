"""Episodes in worker processes: each owns its environment from `reset` to the end."""

from __future__ import annotations

import math
import os
import random
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_dppo.errors import UserError
from megatron_dppo.launch.imports import look_first_in
from megatron_dppo.tasks.environments.config import EnvironmentConfig
from megatron_dppo.tasks.environments.make import Environment, environment_maker, observation_text, own_random_state
from megatron_dppo.tasks.workers.calls import Call, Handler, Hosted, Outcome
from megatron_dppo.tasks.workers.sandbox import require
from megatron_dppo.tasks.workers.workers import Workers, printable

SERVICE = "environment"
_STEP = ("observation", "reward", "terminated", "truncated", "info")


@dataclass(frozen=True)
class Turn:
    """What an environment answered: `observation` as the policy reads it. With an `error` it did not, and its episode
    is over."""

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    error: str = ""
    timed_out: bool = False

    @property
    def ended(self) -> bool:
        """Whether the environment ended the episode with it."""
        return self.terminated or self.truncated

    @property
    def won(self) -> bool:
        """Whether it ended the episode as a success: by itself, with a positive reward."""
        return self.terminated and not self.truncated and self.reward > 0


class Episode:
    """One environment under way. Everything it does to the global random generators stays inside."""

    def __init__(self, environment: Environment, name: str) -> None:
        self._environment, self._name = environment, name

    def reset(self, seed: int) -> str:
        """Start from the initial state of `seed`; returns the first observation. Raises UserError for any failure."""
        named = f"{self._name}.reset(seed={seed})"
        try:
            with own_random_state():
                given = self._environment.reset(seed=seed)
        except Exception as error:
            raise UserError(f"{named} raised {type(error).__name__}: {error}") from error
        observation, info = _parts(named, given, "observation", "info")
        return self._text(observation, info)

    def step(self, action: str) -> Turn:
        """Raises UserError for what is no step, a reward that is no finite number, and text in place of it or of yes
        and no."""
        with own_random_state():
            given = self._environment.step(action)
        parts = _parts(f"{self._name}.step({action!r:.60})", given, *_STEP)
        observation, reward, terminated, truncated, info = parts
        for what, given in (("reward", reward), ("terminated", terminated), ("truncated", truncated)):
            if isinstance(given, str | bytes):  # float("1") is a number, and bool("no") is True
                raise UserError(f"{self._name}.step({action!r:.60}) gave the {what} {given!r:.60}; it must not be text")
        value = float(reward)
        if not np.isfinite(value):
            raise UserError(f"{self._name}.step({action!r:.60}) gave the reward {value}; it must be a finite number")
        return Turn(self._text(observation, info), value, bool(terminated), bool(truncated))

    def _text(self, observation: Any, info: Any) -> str:
        if not isinstance(observation, str):
            raise UserError(f"{self._name} gave the observation {observation!r:.60}; it must be text")
        return observation_text(observation, info or {})


def _parts(named: str, given: Any, *names: str) -> Sequence[Any]:
    """What a method gave, as many as there are `names`: Gym's older interface has others."""
    if not isinstance(given, tuple | list) or len(given) != len(names):
        raise UserError(f"{named} gave {given!r:.60}; it must give ({', '.join(names)})")
    return given


def start_episode(config: EnvironmentConfig, seed: int, folder: str) -> Episode:
    """A new environment in the initial state of `seed`, with which its process's random generators begin too; `folder`
    as `environment_maker` has it."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    episode = Episode(environment_maker(config, folder)(), config.name)
    episode.reset(seed)
    return episode


@dataclass(frozen=True)
class _EnvironmentService:
    """Episodes as processes of the workers; `folder` is where files and modules are looked for first."""

    config: EnvironmentConfig
    folder: str

    def prepare(self) -> None:
        look_first_in(self.folder)
        environment_maker(self.config, self.folder)()

    def open(self, opening: Any) -> Handler:
        """`opening`: the seed of the episode."""
        episode = start_episode(self.config, opening, self.folder)
        return lambda action: vars(episode.step(action))


@dataclass(frozen=True)
class Begun:
    """An episode under way."""

    process: str
    seed: int
    steps: int = 0


class Episodes:
    """Episodes of one environment, all in `workers` workers, each in a process of its own."""

    def __init__(self, config: EnvironmentConfig, workers: int, memory_mib: int) -> None:
        """Raises UserError where steps need a sandbox and the machine has none."""
        self._config = config
        sandboxed, folder = config.sandbox == "full", os.getcwd()
        if sandboxed:
            require(f"task.environment {config.name}", "set task.environment.sandbox=none")
        hosted = Hosted(_EnvironmentService(config, folder), sandboxed, single=False, readable=(folder,))
        services, variables = {SERVICE: hosted}, config.environment
        self._workers = Workers(services, size=workers, memory_mib=memory_mib, environment=variables, at_once=None)

    def begin(self, seed: int) -> Begun:
        """A new episode; its process starts with its first step."""
        return Begun(uuid.uuid4().hex, seed)

    def step(self, episodes: Sequence[Begun], actions: Sequence[str]) -> tuple[list[Turn], list[Begun]]:
        """One step of each episode, at the same time; and the episodes afterwards."""
        limit = self._config.step_timeout_s
        calls = [
            Call(SERVICE, one.process, action, limit, opening=None if one.steps else one.seed, pinned=True)
            for one, action in zip(episodes, actions, strict=True)
        ]
        turns = [read_turn(outcome, self._config.bounds) for outcome in self._workers.run(calls)]
        return turns, [replace(one, steps=one.steps + 1) for one in episodes]

    def end(self, episodes: Iterable[Begun]) -> None:
        """These are over."""
        self._workers.end(one.process for one in episodes)

    def close(self) -> None:
        """End the workers."""
        self._workers.close()


def read_turn(outcome: Outcome, bounds: tuple[float, float]) -> Turn:
    """What a process said as a turn, or as an error where it is none: a stranger may have said it."""
    error, reply, (low, high) = outcome.error, outcome.reply, bounds
    if reply is not None:
        kinds = {"observation": str, "reward": float, "terminated": bool, "truncated": bool, "error": str}
        if {name: type(value) for name, value in reply.items()} != kinds | {"timed_out": bool}:
            error = "what its process answered is no step"
        elif not math.isfinite(reply["reward"]) or not low <= reply["reward"] <= high:
            error = f"the reward {reply['reward']:g} is outside of task.environment.bounds [{low:g}, {high:g}]"
        else:
            text = reply["observation"].encode(errors="replace").decode()  # half a character cannot be tokenized
            return Turn(text, reply["reward"], reply["terminated"], reply["truncated"])
    return Turn("", 0.0, False, True, printable(error), outcome.timed_out)
