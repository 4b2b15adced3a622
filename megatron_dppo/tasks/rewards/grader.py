"""Several rewards, weighted, from one configuration; those that cannot hang run here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import numpy as np
import regex

from megatron_dppo.errors import UserError
from megatron_dppo.tasks.config import TaskConfig
from megatron_dppo.tasks.data.config import text_at
from megatron_dppo.tasks.rewards.config import (
    ExactMatchReward,
    FormatReward,
    MathVerifyReward,
    OverlongReward,
    PythonReward,
    RewardConfig,
    VerifierReward,
    deciding,
)
from megatron_dppo.tasks.rewards.failures import Failures
from megatron_dppo.tasks.rewards.final_answer import end_of_thinking, is_thinking
from megatron_dppo.tasks.rewards.math import MathVerifier
from megatron_dppo.tasks.rewards.patterns import compile_pattern, match_all
from megatron_dppo.tasks.rewards.pool import CustomVerifier, LocalVerifierPool, TimedVerifier, Verifier, VerifierPool
from megatron_dppo.tasks.rewards.verdict import Answered, Verdict
from megatron_dppo.tasks.task import Prompt, Rewards

logger = logging.getLogger(__name__)

Reward = Callable[[Sequence[Answered]], list[Verdict]]
"""Scores responses one by one; the verdicts have the order of the items."""


def exact_match(items: Sequence[Answered], *, ignore_case: bool) -> list[Verdict]:
    """1 where the answer is a reference, runs of white space counting as one space."""

    def plain(text: str) -> str:
        text = " ".join(text.split())
        return text.casefold() if ignore_case else text

    return [
        Verdict(score=0.0, well_formed=False)
        if item.answer is None
        else Verdict(score=float(plain(item.answer) in map(plain, (item.reference, *item.also_accepted))))
        for item in items
    ]


def has_format(items: Sequence[Answered], *, pattern: str) -> list[Verdict]:
    """1 where the whole response matches `pattern`."""
    responses = [item.response for item in items]
    matches = match_all(compile_pattern(pattern), responses, field="task.rewards: pattern")
    return [
        Verdict(score=0.0, well_formed=False, error=str(match), timed_out=True)
        if isinstance(match, TimeoutError)
        else Verdict(score=float(match is not None), well_formed=match is not None)
        for match in matches
    ]


def overlong(items: Sequence[Answered], *, longest: int, buffer: int) -> list[Verdict]:
    """Soft punishment of length |y|, with L = `longest` and c = `buffer` (DAPO, arXiv 2503.14476, Eq. 13):

    0                       |y| <= L - c
    ((L - c) - |y|) / c     L - c < |y| <= L
    -1                      |y| > L

    Raises ValueError without a length: text alone does not tell how many tokens the policy wrote.
    """
    lengths = [item.tokens for item in items]
    if None in lengths:
        raise ValueError("the overlong reward needs the lengths of the responses in tokens")
    over = [(tokens - (longest - buffer)) / buffer for tokens in lengths if tokens is not None]
    return [Verdict(score=-min(max(share, 0.0), 1.0)) for share in over]


@dataclass(frozen=True)
class _Part:
    config: RewardConfig
    reward: Reward
    failures: Failures = field(default_factory=Failures)


@dataclass(frozen=True)
class Judged:
    """What each reward says of some responses, before anything is made of it."""

    questions: Sequence[int]
    """Number of the question of each."""
    verdicts: Sequence[Sequence[Verdict | None]]
    """Of each reward, in the order of the responses; None where it is not for the question."""
    undecided: int
    """Responses in which `answer_pattern` took too long."""

    @staticmethod
    def concatenate(several: Sequence[Judged]) -> Judged:
        """Of all responses, in order."""
        verdicts = [list(chain(*of_one)) for of_one in zip(*(one.verdicts for one in several), strict=True)]
        questions = [number for one in several for number in one.questions]
        return Judged(questions, verdicts, sum(one.undecided for one in several))


@dataclass(frozen=True)
class Grader:
    """Scores responses by all rewards of a task that are for their questions. The reward that is trained on is the
    weighted sum; the first in the list that is for a question decides what is correct (a full score of 1) and
    well-formed.

    A response that was cut off by the length, or that ends inside its thinking, has no answer. One that a reward could
    not score (an exception, no number inside its bounds, out of time, a dead worker) has 0 from it and is counted;
    the first reason of each call is logged as a warning. Where a function of the user's fails on all responses to
    several questions in a row, see `Failures`, there is nothing to learn from, and UserError says why.
    """

    parts: Sequence[_Part]
    answer_pattern: regex.Pattern[str]
    pool: VerifierPool | None = field(default=None)

    def score(
        self,
        prompts: Sequence[Prompt],
        responses: Sequence[str],
        lengths: Sequence[int] | np.ndarray | None = None,
        finish_reasons: Sequence[str] | None = None,
    ) -> Rewards:
        """`judge`, then `rewards`."""
        return self.rewards(self.judge(prompts, responses, lengths, finish_reasons))

    def judge(
        self,
        prompts: Sequence[Prompt],
        responses: Sequence[str],
        lengths: Sequence[int] | np.ndarray | None = None,
        finish_reasons: Sequence[str] | None = None,
    ) -> Judged:
        """Score `responses[i]`, of `lengths[i]` tokens, as a response to `prompts[i]`; the text has no special tokens
        but tags around its thinking. Rewards that look at lengths need them. Where `finish_reasons[i]` is "length" the
        response was cut off, and has no answer."""
        if len(prompts) != len(responses):
            raise ValueError(f"{len(prompts)} prompts but {len(responses)} responses")
        reasons = [""] * len(prompts) if finish_reasons is None else finish_reasons
        cut = [reason == "length" for reason in reasons]
        answers, undecided = self._answers(prompts, responses, cut)
        items = [
            Answered(
                question=prompt.question,
                reference=prompt.answer,
                also_accepted=prompt.also_accepted,
                response=response,
                answer=answers[i],
                tokens=None if lengths is None else int(lengths[i]),
                truncated=cut[i],
                metadata=prompt.metadata,
            )
            for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
        ]
        questions = [prompt.index for prompt in prompts]
        return Judged(questions, [_of_those_it_is_for(part, items) for part in self.parts], undecided)

    def rewards(self, judged: Judged) -> Rewards:
        """What is trained on, of all responses of a call; they may have been judged apart."""
        count = len(judged.verdicts[0])
        total = np.zeros(count, dtype=np.float64)
        scores, errors, timeouts = {}, {}, {}
        correct, well_formed = np.zeros((2, count), dtype=bool)
        undecided = np.ones(count, dtype=bool)
        for part, of_all in zip(self.parts, judged.verdicts, strict=True):
            name, asked = part.config.label, np.array([verdict is not None for verdict in of_all], dtype=bool)
            verdicts = [verdict for verdict in of_all if verdict is not None]
            failed = [verdict for verdict in verdicts if verdict.error]
            if isinstance(part.config, PythonReward):
                part.failures.count(name, np.asarray(judged.questions)[asked].tolist(), verdicts)
            if failed:
                logger.warning("reward %s could not score %d of %d: %s", name, len(failed), len(verdicts),
                               failed[0].error)  # fmt: skip
            scores[name] = np.full(count, np.nan, dtype=np.float32)
            scores[name][asked] = [verdict.score for verdict in verdicts]
            errors[name] = len(failed)
            timeouts[name] = sum(verdict.timed_out for verdict in verdicts)
            total[asked] += part.config.weight * scores[name][asked]
            decided = np.flatnonzero(asked & undecided)
            correct[decided] = scores[name][decided] >= 1
            well_formed[decided] = [of_all[i].well_formed for i in decided]
            undecided &= ~asked
        with np.errstate(over="ignore"):
            reward = total.astype(np.float32)
        if not np.isfinite(reward).all():
            raise UserError("task.rewards: the weighted sum is beyond the range of float32; lower the weights")
        return Rewards(
            reward=reward,
            correct=correct,
            well_formed=well_formed,
            verifier_errors=sum(errors.values()) + judged.undecided,
            parts=scores,
            errors=errors,
            timeouts=timeouts,
        )

    @property
    def doubtful(self) -> frozenset[int]:
        """Questions on all responses to which a function of the user's failed, where it scored none since."""
        return frozenset(chain.from_iterable(part.failures.doubtful for part in self.parts))

    def trust(self, scored: Sequence[Prompt] | None = None) -> None:
        """The functions that are for these questions, by default all, scored responses in a process before."""
        for part in self.parts:
            if scored is None or any(part.config.is_for(prompt.metadata) for prompt in scored):
                part.failures.trust()

    def check(self, prompts: Sequence[Prompt], of: str = "") -> None:
        """Raise UserError with the first question, `of` which set, for which no reward decides what is correct."""
        rewards = [part.config for part in self.parts]
        for prompt in prompts:
            if deciding(rewards, prompt.metadata) is None:
                read = sorted({path for one in rewards for path in one.when})
                has = ", ".join(f"{path}={text_at(prompt.metadata, path)!r:.40}" for path in read)
                raise UserError(
                    f"{of}task.rewards: none decides what is a correct answer to {prompt.question[:60]!r} ({has}); "
                    "name its value in the `when` of one that is not overlong, or end the list with one for all"
                )

    def scores(self, name: str, prompt: Prompt) -> bool:
        """Whether the reward of this name is for a question."""
        return any(part.config.label == name and part.config.is_for(prompt.metadata) for part in self.parts)

    def prepare(self) -> None:
        """Import the functions of the user's, so that one that is not there is found before engines are started (on
        Ray's nodes with the first answer). Raises UserError where one cannot be had."""
        if isinstance(self.pool, LocalVerifierPool):
            self.pool.prepare()

    def close(self) -> None:
        """End the worker processes, if there are any."""
        if self.pool is not None:
            self.pool.close()

    def _answers(
        self, prompts: Sequence[Prompt], responses: Sequence[str], cut: Sequence[bool]
    ) -> tuple[list[str | None], int]:
        """What `answer_pattern` finds in each response that was not cut off, and how many it could not decide. A chat
        template may open the thinking, so the prompt counts as its begin."""
        matches = match_all(self.answer_pattern, responses, field="task.answer_pattern")
        answers: list[str | None] = []
        for i, match in enumerate(matches):
            begun = prompts[i].text[-40:]
            if match is None or isinstance(match, TimeoutError) or cut[i] or is_thinking(begun + responses[i]):
                answers.append(None)
            else:  # an answer inside the thinking is none
                answers.append(match["answer"] if match.end("answer") > end_of_thinking(responses[i]) else None)
        late = [match for match in matches if isinstance(match, TimeoutError)]
        if late:
            logger.warning("%s, on %d of %d responses", late[0], len(late), len(matches))
        return answers, len(late)


def build_grader(config: TaskConfig, *, max_response_tokens: int, verifier: Verifier | None = None) -> Grader:
    """The rewards of a task, by default its own `verifier` or, without one, math-verify. Raises UserError for settings
    that contradict."""
    configs = config.rewards or (MathVerifyReward() if verifier is None else VerifierReward(),)
    names = [one.label for one in configs]
    if len(set(names)) < len(names):
        raise UserError(f"task.rewards: two are named alike ({', '.join(names)}); set name")
    if verifier is None and any(one.kind == "verifier" for one in configs):
        raise UserError("task.rewards: this kind of task has no verifier of its own; choose another reward")
    verifiers = {one.label: timed for one in configs if (timed := _timed(one, verifier)) is not None}
    pool = _pool(config, verifiers) if verifiers else None
    if configs[0].kind == "overlong" and not configs[0].when:
        raise UserError("task.rewards: the first reward decides what is correct; overlong cannot, put another first")
    parts = []
    for one in configs:
        reward: Reward
        if one.label in verifiers:
            assert pool is not None
            reward = partial(_verified, pool, one.label)
        elif isinstance(one, ExactMatchReward):
            reward = partial(exact_match, ignore_case=one.ignore_case)
        elif isinstance(one, FormatReward):
            reward = partial(has_format, pattern=one.pattern)
        else:
            assert isinstance(one, OverlongReward)  # all others are verifiers
            longest, buffer = one.max_response_tokens or max_response_tokens, one.buffer_tokens
            if buffer >= longest:
                raise UserError(
                    f"task.rewards: buffer_tokens={buffer} must be below the {longest} tokens of a response"
                )
            reward = partial(overlong, longest=longest, buffer=buffer)
        parts.append(_Part(one, reward))
    return Grader(parts, compile_pattern(config.answer_pattern), pool)


def _pool(config: TaskConfig, verifiers: Mapping[str, TimedVerifier]) -> VerifierPool:
    workers, memory_mib = config.reward_workers, config.reward_memory_mib
    if config.reward_placement == "local":
        return LocalVerifierPool(verifiers, workers=workers, memory_mib=memory_mib)
    from megatron_dppo.tasks.rewards.ray_workers import RayVerifierPool  # with Ray

    return RayVerifierPool(verifiers, workers=workers, memory_mib=memory_mib)


def _of_those_it_is_for(part: _Part, items: Sequence[Answered]) -> list[Verdict | None]:
    verdicts: list[Verdict | None] = [None] * len(items)
    chosen = [number for number, item in enumerate(items) if part.config.is_for(item.metadata)]
    if chosen:
        for number, verdict in zip(chosen, part.reward([items[number] for number in chosen]), strict=True):
            verdicts[number] = verdict
    return verdicts


def _verified(pool: VerifierPool, name: str, items: Sequence[Answered]) -> list[Verdict]:
    return pool.verify([(name, item) for item in items])


def _timed(config: RewardConfig, verifier: Verifier | None) -> TimedVerifier | None:
    """What runs in worker processes; None for rewards that run here."""
    if isinstance(config, VerifierReward) and verifier is not None:
        return TimedVerifier(verifier, config.timeout_s, sandboxed=config.sandbox == "full")
    if isinstance(config, MathVerifyReward):
        mathematics = MathVerifier(config.boxed_only, config.precision, config.timeout_s)
        return TimedVerifier(mathematics, config.timeout_s + 2.0)
    if isinstance(config, PythonReward):
        custom = CustomVerifier(config.path)
        return TimedVerifier(
            custom,
            config.timeout_s,
            config.bounds,
            sandboxed=config.sandbox == "full",
            environment=config.environment,
            readable=(custom.folder, *([] if custom.file is None else [str(custom.file.parent)])),
        )
    return None
