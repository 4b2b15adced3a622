"""Episodes that harnesses play, each at its own pace against a session of its own.

```
a step's thread ── play ──► sessions opened ─► workers ─► a process per episode ──┐
   │ waits for all                                                               │ HTTP
session server, its threads ◄────────────────────────────────────────────────────┘
   └── generate, one turn each ──► fleet ──► engines
```
The loop of rank 0 waits for none of this but the step's thread.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from transformers import PreTrainedTokenizerBase

from megatron_dppo.actor.profiling import covered
from megatron_dppo.agents.harness import BadReport, HarnessService, Report, read_report
from megatron_dppo.agents.server import SessionServer
from megatron_dppo.agents.sessions import Session, SessionLimits, SessionRecord
from megatron_dppo.batch import RolloutBatch
from megatron_dppo.errors import UserError
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.engine import Generates, GenerationRequest, SamplingConfig
from megatron_dppo.rollout.seeds import TRAINING
from megatron_dppo.tasks.config import TaskConfig
from megatron_dppo.tasks.prompting import user_message, with_system_prompt
from megatron_dppo.tasks.rewards.grader import Grader
from megatron_dppo.tasks.task import Prompt, Rewards
from megatron_dppo.tasks.workers.calls import Call, Hosted, Outcome
from megatron_dppo.tasks.workers.workers import Workers, printable
from megatron_dppo.trainer.episodes import Episodes, TurnReturns
from megatron_dppo.trainer.requests import Draws, numbered

logger = logging.getLogger(__name__)

PART = "agent"
"""Name under which rewards, failures and timeouts of episodes are logged, and of the workers' service."""
_MOST_LINES = 20
"""In the log, on failures of a step."""


@dataclass(eq=False)
class _Played:
    """An episode that has ended."""

    prompt: Prompt
    record: SessionRecord
    report: Report
    error: str
    """Why there is no report; "" where there is one, or where the session's own limit ended the episode."""
    timed_out: bool

    @property
    def cut(self) -> bool:
        return bool(self.record.cut) or self.timed_out


class AgentPlayer:
    """Plays the episodes of `task.kind: agent`."""

    any_prompts = True

    def __init__(
        self,
        config: TaskConfig,
        rollout: RolloutConfig,
        tokenizer: PreTrainedTokenizerBase,
        grader: Grader | None,
    ) -> None:
        """`grader` scores answers; None where nothing can be scored (an environment's prompts). Raises UserError where
        there is no such harness."""
        assert config.agent is not None
        self._config, self._agent, self._grader = config, config.agent, grader
        self._service = HarnessService(config.agent, config.environment, os.getcwd())
        self._service.check()
        self._limits = SessionLimits(
            max_turns=config.agent.max_turns,
            max_tokens=rollout.max_model_len,
            max_response_tokens=rollout.max_response_tokens,
            max_prompt_tokens=rollout.max_prompt_tokens,
        )
        self._engine: Generates | None = None
        self._server = SessionServer(
            self._sample,
            tokenizer,
            stop_token_ids=rollout.stop_token_ids,
            chat_template_kwargs=config.chat_template_kwargs,
            date=config.date,
            tool_format=config.agent.tool_format,
            other_sampling=config.agent.other_sampling,
            edited=config.agent.edited,
        )
        self._workers: list[Workers] = []
        self._idle: list[Workers] = []
        self._lock = threading.Lock()
        self._sampling: Counter[str] = Counter()
        """Answers that engines are at, by what their step is called."""
        self._ended = threading.Condition(self._lock)

    def play(
        self,
        engine: Generates,
        sampling: SamplingConfig,
        prompts: Sequence[Prompt],
        samples: int,
        draws: Draws,
        grader: Grader | None = None,
    ) -> Episodes:
        """See `Player.play`."""
        self._engine = engine
        started = time.monotonic()
        asked = list(numbered(prompts, samples))
        sessions: list[Session] = []
        try:
            for prompt, sample in asked:
                session = self._server.open(
                    draws.name(prompt, sample),
                    sampling=sampling,
                    training=draws.stream == TRAINING,
                    seed=partial(draws.seed, prompt, sample),
                    limits=self._limits,
                )
                sessions.append(session)
            outcomes = self._run([self._call(*one) for one in zip(asked, sessions, strict=True)])
        finally:
            records = [self._finish(session) for session in sessions]
            with self._ended:  # of episodes that were killed: engines may be put to sleep after a step
                self._ended.wait_for(lambda: not any(self._sampling[_step_of(one.name)] for one in sessions[:1]))
        for record in records:
            if record.error is not None:  # the engines', not the harness's
                raise record.error
        played = [
            self._read(prompt, record, outcome)
            for (prompt, _), record, outcome in zip(asked, records, outcomes, strict=True)
        ]
        _report([session.name for session in sessions], played)
        rewards = self._rewards(played, grader or self._grader)
        return self._episodes(played, rewards, time.monotonic() - started)

    def close(self) -> None:
        """End the server and the processes of all episodes. A step that is under way fails."""
        self._server.close()
        with self._lock:
            self._idle.clear()
            workers, self._workers = self._workers, []
        for one in workers:
            one.close()

    def _finish(self, session: Session) -> SessionRecord:
        self._server.forget(session)
        return session.finish()

    def _sample(self, request: GenerationRequest, sampling: SamplingConfig, training: bool) -> RolloutBatch:
        assert self._engine is not None
        step = _step_of(request.request_id)
        with self._lock:
            self._sampling[step] += 1
        try:
            return self._engine.generate([request], sampling, training=training)
        finally:
            with self._ended:
                self._sampling[step] -= 1
                self._ended.notify_all()

    def _call(self, asked: tuple[Prompt, int], session: Session) -> Call:
        prompt, sample = asked
        given = {
            "row": self._row(prompt, sample),
            "base_url": session.base_url,
            "api_key": session.api_key,
            "timeout_s": self._agent.timeout_s,
        }
        return Call(PART, session.api_key, given, self._agent.timeout_s)

    def _row(self, prompt: Prompt, sample: int) -> dict[str, object]:
        """What a harness learns of its question. JSON has no other kinds of values than these."""
        message = user_message(self._config, prompt.question, prompt.metadata)
        return {
            "index": prompt.index,
            "sample": sample,
            "question": prompt.question,
            "answer": prompt.answer,
            "messages": with_system_prompt(self._config, [{"role": "user", "content": message}]),
            "metadata": _plain(dict(prompt.metadata)),
        }

    def _run(self, calls: Sequence[Call]) -> list[Outcome]:
        """Steps that are sampled ahead, and an evaluation meanwhile, each have workers of their own."""
        with self._lock:
            if self._idle:
                workers = self._idle.pop()
            else:
                workers = self._start()
                self._workers.append(workers)
        outcomes = workers.run(calls)
        with self._lock:
            self._idle.append(workers)
        return outcomes

    def _start(self) -> Workers:
        size = min(self._config.reward_workers, self._agent.at_once)
        return Workers(
            {PART: Hosted(self._service, sandboxed=False, single=True)},
            size=size,
            memory_mib=self._agent.memory_mib,
            environment=self._agent.environment,
            at_once=math.ceil(self._agent.at_once / size),
        )

    def _read(self, prompt: Prompt, record: SessionRecord, outcome: Outcome) -> _Played:
        """What a process said, which may be anything."""
        reply = outcome.reply or {}
        error = outcome.error or str(reply.get("failed", ""))
        said, report = reply.get("said", record.reported), Report()  # what was sent counts, whatever came of it then
        try:
            if said is None:
                raise BadReport("it ended without a report")
            report = read_report(said, len(record.turns), self._agent.bounds)
            if report.answer is not None and self._grader is None:
                raise BadReport("it reported an answer, which no task.rewards can score; report a reward")
        except BadReport as problem:
            error = error or str(problem)
        if record.cut and not outcome.timed_out and "failed" in reply:
            error = ""  # it was refused another turn, and gave up
        return _Played(prompt, _masked(record, report.untrained), report, printable(error), outcome.timed_out)

    def _rewards(self, played: Sequence[_Played], grader: Grader | None) -> Rewards:
        total = np.array([one.report.reward + sum(one.report.turns.values()) for one in played], dtype=np.float32)
        correct = total > 0
        answered = [number for number, one in enumerate(played) if one.report.answer is not None]
        errors, timeouts, parts = {}, {}, {}
        if answered and grader is not None:
            asked = [played[n].prompt for n in answered]
            verdicts = grader.score(asked, [str(played[n].report.answer) for n in answered])
            total[answered] += verdicts.reward
            correct[answered] = verdicts.correct
            errors, timeouts = dict(verdicts.errors), dict(verdicts.timeouts)
            for name, values in verdicts.parts.items():
                scored = [0.0 if grader.scores(name, one.prompt) else np.nan for one in played]
                parts[name] = np.array(scored, dtype=np.float32)
                parts[name][answered] = values
        for number, one in enumerate(played):
            if one.report.correct is not None:
                correct[number] = one.report.correct
        failed = sum(bool(one.error) for one in played)
        whole = [
            not one.error and not one.cut and all(t.finish_reason != "length" for t in one.record.turns)
            for one in played
        ]
        return Rewards(
            reward=total,
            correct=correct,
            well_formed=np.array(whole, dtype=bool),
            verifier_errors=failed + sum(errors.values()),
            parts={PART: total, **parts},
            errors={PART: failed, **errors},
            timeouts={PART: sum(one.timed_out for one in played), **timeouts},
        )

    def _episodes(self, played: Sequence[_Played], rewards: Rewards, seconds: float) -> Episodes:
        sequences = [
            replace(branch, finish_reasons=("length",)) if one.cut else branch
            for one in played
            for branch in one.record.branches
        ]
        if not sequences:
            raise UserError(f"task.agent: none of the {len(played)} episodes has a turn to train on")
        episode = np.repeat(np.arange(len(played)), [len(one.record.branches) for one in played])
        returns = None
        if self._agent.credit == "turn":
            returns = _turn_returns(played, rewards.reward, self._agent.discount)
        turns = np.array([len(one.record.turns) for one in played])
        batch = RolloutBatch.concatenate(sequences)
        return Episodes(batch, episode, rewards, turns, _metrics(played, seconds), returns)


def _step_of(name: str) -> str:
    """What the sessions of a step have in common in their names."""
    return "/".join(name.split("/")[:2])


def _masked(record: SessionRecord, numbers: frozenset[int]) -> SessionRecord:
    """Without the turns of these numbers in the loss: they are context, as if somebody else had said them."""
    if not numbers:
        return record
    branches, turns = list(record.branches), list(record.turns)
    for number in sorted(numbers):
        turn = turns[number]
        if turn.trained:
            rows = slice(turn.prompt, turn.prompt + turn.sampled)
            branches[turn.branch] = _context(branches[turn.branch], rows)
            turns[number] = replace(turn, why_not="its harness said so")
    kept = [number for number, branch in enumerate(branches) if branch.loss_mask.any()]
    place = {number: new for new, number in enumerate(kept)}
    return replace(
        record,
        branches=tuple(branches[number] for number in kept),
        turns=tuple(replace(turn, branch=place.get(turn.branch, -1)) for turn in turns),
    )


def _context(batch: RolloutBatch, rows: slice) -> RolloutBatch:
    """With these tokens as tokens that the policy did not sample."""
    loss_mask, mu_logp = batch.loss_mask.copy(), batch.mu_logp.copy()
    topk_ids, topk_logp = batch.topk_ids.copy(), batch.topk_logp.copy()
    loss_mask[rows], mu_logp[rows], topk_ids[rows], topk_logp[rows] = False, 0.0, -1, -np.inf
    return replace(batch, loss_mask=loss_mask, mu_logp=mu_logp, topk_ids=topk_ids, topk_logp=topk_logp)


def _plain(value: object) -> object:
    """As JSON can say it; what it cannot is text."""
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _report(names: Sequence[str], played: Sequence[_Played]) -> None:
    """A line for each episode that failed; not for thousands."""
    failed = [(name, one.error) for name, one in zip(names, played, strict=True) if one.error]
    if failed and len(failed) == len(played):
        raise UserError(f"task.agent failed in all {len(failed)} episodes: {failed[0][1]}")
    for name, error in failed[:_MOST_LINES]:
        logger.warning("episode %s failed: %s", name, error)
    if len(failed) > _MOST_LINES:
        logger.warning("%d of %d episodes failed", len(failed), len(played))


def _turn_returns(played: Sequence[_Played], rewards: np.ndarray, discount: float) -> TurnReturns:
    """The episode's own reward, or that of its answer, comes with its last turn."""
    rows: list[tuple[int, int, int, int, float]] = []
    first = 0
    for number, one in enumerate(played):
        gained = [one.report.turns.get(turn, 0.0) for turn in range(len(one.record.turns))]
        left = float(rewards[number]) - sum(gained)
        for turn in reversed(range(len(gained))):
            left = gained[turn] + (left if turn == len(gained) - 1 else discount * left)
            record = one.record.turns[turn]
            if record.trained:
                rows.append((first + record.branch, record.prompt - 1, number, turn, left))
        first += len(one.record.branches)
    return TurnReturns.of(rows)


def _metrics(played: Sequence[_Played], seconds: float) -> dict[str, float]:
    """Means per episode, and counts of the step."""
    records = [one.record for one in played]
    turns = [turn for record in records for turn in record.turns]
    waits = [
        max(0.0, later.started - earlier.ended)
        for record in records
        for earlier, later in zip(record.turns, record.turns[1:], strict=False)
    ]
    count, branches = len(played), [branch for record in records for branch in record.branches]
    return {
        "agent/turns_max": float(max(len(record.turns) for record in records)),
        "agent/turn_tokens_mean": sum(turn.sampled for turn in turns) / max(len(turns), 1),
        "agent/turn_seconds_mean": sum(turn.ended - turn.started for turn in turns) / max(len(turns), 1),
        "agent/tool_seconds_mean": sum(waits) / count,
        "agent/engine_busy_fraction": covered([(turn.started, turn.ended) for turn in turns]) / max(seconds, 1e-9),
        "agent/branches": float(len(branches) - sum(bool(record.branches) for record in records)),
        "agent/rendered_anew": float(sum(bool(turn.rendered_anew) for turn in turns)),
        "agent/untrained_turns": float(sum(not turn.trained for turn in turns)),
        "agent/retries": float(sum(turn.retries for turn in turns)),
        "agent/refused_requests": float(sum(record.refused for record in records)),
        "agent/cut_episodes": float(sum(bool(record.cut) for record in records)),
        "agent/silent_episodes": float(sum(not record.branches for record in records)),
    }
