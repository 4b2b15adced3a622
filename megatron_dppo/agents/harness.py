"""Harnesses in processes of their own: what an episode is given, and what it may say.

```
controller ── row, session's address and key ──► supervisor ── fork ──► process of one episode
                                                                         │ a function, or a program in its group
session server ◄─────────────── HTTP: chat completions ──────────────────┤
controller ◄── bounded JSON: the report ── supervisor ◄──────────────────┘  killed whole at its time limit
```
A harness is its user's own code, trusted as a reward function is: it has the run's rights, but neither its environment
variables nor its time.
"""

from __future__ import annotations

import asyncio
import json
import numbers
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_dppo.agents import MODEL
from megatron_dppo.errors import UserError
from megatron_dppo.launch.imports import load_callable, look_first_in
from megatron_dppo.tasks.agent import AgentConfig
from megatron_dppo.tasks.environments.config import EnvironmentConfig
from megatron_dppo.tasks.environments.episode import start_episode
from megatron_dppo.tasks.environments.make import environment_maker
from megatron_dppo.tasks.workers.calls import Handler

LARGEST_REPORT = 1 << 16
"""Bytes of a report."""
_KNOWN = ("reward", "answer", "turn_rewards", "untrained_turns", "correct")
_SHOWN = 400
"""Bytes of what a harness printed last that stand in an error."""


@dataclass(frozen=True)
class Report:
    """What a harness says in the end."""

    reward: float = 0.0
    """Of the whole episode."""
    turns: Mapping[int, float] = field(default_factory=dict)
    """Rewards of single turns, by their numbers from 0."""
    untrained: frozenset[int] = frozenset()
    """Turns that are not to be trained on."""
    answer: str | None = None
    """To be scored by the task's rewards, in place of `reward`."""
    correct: bool | None = None
    """Whether the episode was a success; None: whether its rewards add up to more than 0."""


class BadReport(ValueError):
    """What came is no report."""


def read_report(said: Any, turns: int, bounds: tuple[float, float]) -> Report:
    """`said` as the report on an episode of `turns` turns. Raises BadReport, with the reason, for anything else."""
    if not isinstance(said, dict):
        raise BadReport(f"it reported {said!r:.60}, which is no JSON object")
    if unknown := sorted(map(repr, said.keys() - set(_KNOWN))):
        raise BadReport(f"its report has {unknown[0]:.60}; known are {', '.join(_KNOWN)}")
    reward, answer, correct = said.get("reward"), said.get("answer"), said.get("correct")
    of_turns = said.get("turn_rewards") or {}
    if answer is not None and not isinstance(answer, str):
        raise BadReport(f"its answer is {answer!r:.60}, which is no text")
    if correct is not None and not isinstance(correct, bool):
        raise BadReport(f"its correct is {correct!r:.60}, which is no truth value")
    if (reward is None) == (answer is None):
        raise BadReport("its report must have a reward or an answer, and not both")
    if isinstance(of_turns, list):
        of_turns = dict(enumerate(of_turns))
    if not isinstance(of_turns, dict):
        raise BadReport(f"its turn_rewards are {of_turns!r:.60}; give a list, or an object by the turn's number")
    rewards: dict[int, float] = {}
    for name, value in of_turns.items():
        number = _turn(name, turns)
        rewards[number] = _reward(value, f"the reward of turn {number}", bounds)
    masked = said.get("untrained_turns") or []
    if not isinstance(masked, list):
        raise BadReport(f"its untrained_turns are {masked!r:.60}; give a list of numbers")
    text = None if answer is None else answer.encode(errors="replace").decode()  # half a character is no text
    untrained = frozenset(_turn(number, turns) for number in masked)
    of_all = 0.0 if reward is None else _reward(reward, "the reward", bounds)
    return Report(of_all, rewards, untrained, text, correct)


def _turn(name: Any, turns: int) -> int:
    number = int(name) if str(name).isascii() and str(name).isdecimal() and len(str(name)) < 10 else -1
    if not 0 <= number < turns:
        raise BadReport(f"it names turn {name!r:.20}; the episode has turns 0 to {turns - 1}")
    return number


def _reward(value: Any, what: str, bounds: tuple[float, float]) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadReport(f"{what} is {value!r:.60}, which is no number")
    if not bounds[0] <= value <= bounds[1]:  # no number that is not finite is
        raise BadReport(f"{what} is {value!r:.20}, outside of task.agent.bounds [{bounds[0]:g}, {bounds[1]:g}]")
    return float(value)


@dataclass(frozen=True)
class HarnessService:
    """Episodes as processes of the workers; `folder` is where the run was started: files and modules are looked for
    there, and programs run there."""

    agent: AgentConfig
    environment: EnvironmentConfig | None
    folder: str

    def check(self) -> None:
        """Raises UserError where there is no such harness."""
        if self.agent.command:
            program = self.agent.command[0]
            if shutil.which(program, path=os.environ.get("PATH", os.defpath)) is None:
                raise UserError(f"task.agent.command: there is no program {program}; install it, or give its path")
        elif self.environment is not None:
            environment_maker(self.environment, self.folder)()
        elif self.agent.function is not None:
            function = self._function()
            if not asyncio.iscoroutinefunction(function):
                raise UserError(f"task.agent.function={self.agent.function} is no `async def`; it must be one")

    def prepare(self) -> None:
        if not self.agent.command:
            asyncio.run(_load_client())
        look_first_in(self.folder)
        self.check()

    def open(self, opening: Any) -> Handler:
        return self._play

    def _play(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """One episode. `given`: row, base_url, api_key, timeout_s. Returns its report as it came (`said`), or why there
        is none (`failed`), or neither, where it may have come by HTTP."""
        printed = _Printed()
        local = ",".join(filter(None, [os.environ.get("NO_PROXY"), "127.0.0.1", "localhost"]))
        os.environ.update(
            OPENAI_BASE_URL=given["base_url"],
            OPENAI_API_KEY=given["api_key"],
            OPENAI_MODEL=MODEL,
            NO_PROXY=local,
            no_proxy=local,
        )
        try:
            return self._run(given["row"]) if self.agent.command else self._call(given)
        except BaseException as error:  # also what asks a program to end: sys.exit has its reason too
            said = printed.last()
            why = str(error) if isinstance(error, BadReport) else f"{type(error).__name__}: {error}"
            return {"failed": why[:_SHOWN] + (f"; it printed {said!r}" if said else "")}

    def _run(self, row: Mapping[str, Any]) -> dict[str, Any]:
        folder = Path(os.environ["TMPDIR"])  # of this process alone, and removed with it
        asked, report = folder / "row.json", folder / "report.json"
        asked.write_text(json.dumps(row))
        variables = os.environ | {"AGENT_ROW": str(asked), "AGENT_REPORT": str(report)}
        status = subprocess.run(
            self.agent.command, stdin=subprocess.DEVNULL, env=variables, cwd=self.folder, check=False
        ).returncode
        if status:
            raise BadReport(f"its command ended with status {status}")
        if not report.exists():
            return {}  # unless it came by HTTP
        with open(report, "rb") as file:
            text = file.read(LARGEST_REPORT + 1)
        if len(text) > LARGEST_REPORT:
            raise BadReport(f"its report has more than {LARGEST_REPORT:,} bytes")
        return {"said": json.loads(text)}

    def _call(self, given: Mapping[str, Any]) -> dict[str, Any]:
        function: Callable[..., Any] = self._environment if self.environment else self._function()

        async def play() -> Any:
            async with _client(given["timeout_s"]) as client:
                return await function(client, given["row"])

        said = asyncio.run(play())
        if isinstance(said, str):
            return {"said": {"answer": said}}
        if isinstance(said, numbers.Real) and not isinstance(said, bool):
            return {"said": {"reward": float(said)}}
        if not isinstance(said, dict):
            raise BadReport(f"it returned {said!r:.60}; return a number, an answer (text) or a report (a dictionary)")
        return {"said": json.loads(json.dumps(said, default=_plain))}

    def _function(self) -> Callable[..., Any]:
        return load_callable(str(self.agent.function), named="task.agent.function: ", folder=self.folder)

    async def _environment(self, client: Any, row: Mapping[str, Any]) -> dict[str, Any]:
        """An environment with GEM's `reset` and `step`, played by chat: its observations are the user's messages."""
        assert self.environment is not None
        played = start_episode(self.environment, row["metadata"]["seed"], self.folder)
        messages, rewards, won = list(row["messages"]), [], False
        for _ in range(self.environment.max_turns):
            answer = (await client.chat.completions.create(model=MODEL, messages=messages)).choices[0].message
            turn = played.step(answer.content or "")
            rewards.append(turn.reward)
            if turn.ended:
                won = turn.won
                break
            messages += [answer.model_dump(exclude_none=True), {"role": "user", "content": turn.observation}]
        return {"reward": 0.0, "turn_rewards": rewards, "correct": won}


def _plain(value: Any) -> Any:
    """A number of numpy's or torch's as JSON has it."""
    if not hasattr(value, "item"):
        raise BadReport(f"its report has {value!r:.60}, which JSON cannot say")
    return value.item()


def _client(timeout_s: float) -> Any:
    """An `openai.AsyncOpenAI` for the session, which is on this machine: no certificates have to be read."""
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    return AsyncOpenAI(timeout=timeout_s, http_client=DefaultAsyncHttpxClient(verify=False, timeout=timeout_s))


async def _load_client() -> None:
    """The client imports its parts when they are first used: once here, and not in every process that is forked."""
    os.environ.setdefault("OPENAI_API_KEY", "none")
    with suppress(Exception):
        async with _client(1.0).with_options(base_url="http://127.0.0.1:9/v1", max_retries=0) as client:
            await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "?"}])


class _Printed:
    """What this process and those that it starts print from now on: read, and dropped but for the end."""

    def __init__(self) -> None:
        reading, writing = os.pipe()
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        os.close(writing)
        self._last = b""
        threading.Thread(target=self._read, args=(reading,), daemon=True).start()

    def _read(self, end: int) -> None:
        while piece := os.read(end, 1 << 16):
            self._last = (self._last + piece)[-_SHOWN:]

    def last(self) -> str:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # a harness may have closed it, or put something else there
                stream.flush()
        threading.Event().wait(0.05)  # for the thread to read it
        return self._last.decode(errors="replace").strip()
