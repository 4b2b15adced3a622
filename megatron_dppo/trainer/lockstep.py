"""Episodes of an environment, turn by turn: the engine writes in all of them, the environment answers in all."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from transformers import PreTrainedTokenizerBase

from megatron_dppo.agents.messages import Message, Refused
from megatron_dppo.agents.rendering import CannotContinue, ChatRenderer
from megatron_dppo.agents.response_text import said_aloud
from megatron_dppo.batch import RolloutBatch, join_turns
from megatron_dppo.errors import UserError
from megatron_dppo.rollout.engine import Generates, GenerationRequest, SamplingConfig
from megatron_dppo.rollout.seeds import TRAINING
from megatron_dppo.tasks.config import TaskConfig
from megatron_dppo.tasks.environments.environment_task import EnvironmentTask
from megatron_dppo.tasks.environments.episode import Begun, Turn
from megatron_dppo.tasks.prompting import encode_text, split_special
from megatron_dppo.tasks.rewards.grader import Grader
from megatron_dppo.tasks.task import Prompt, Rewards
from megatron_dppo.trainer.episodes import Episodes
from megatron_dppo.trainer.requests import Draws, numbered

logger = logging.getLogger(__name__)

PART = "environment"
"""Name under which an environment's reward is logged."""


@dataclass(eq=False)
class _Running:
    """An episode under way."""

    prompt: Prompt
    sample: int
    episode: Begun
    ids: np.ndarray
    """Everything so far: the prompt of the next turn."""
    turns: list[RolloutBatch] = field(default_factory=list)
    known: int = 0
    """Tokens that the turns have."""
    total: float = 0.0
    correct: bool = False
    ended: bool = False
    """By the environment, not for want of turns or tokens."""
    failed: Turn | None = None
    """The step that the environment did not take."""


class EnvironmentPlayer:
    """Plays the episodes of `task.kind: environment`. The reward of an episode is the sum of its steps' (no discount);
    it is correct when its last step ended it with a positive reward, and well-formed when the policy ended every turn
    itself."""

    any_prompts = False

    def __init__(
        self,
        task: EnvironmentTask,
        config: TaskConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_prompt_tokens: int,
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        self._task, self._tokenizer, self._max_prompt_tokens = task, tokenizer, max_prompt_tokens
        self._given, self._renderer = config.chat_template_kwargs, None
        if config.chat_template:
            stops = {tokenizer.eos_token_id, *stop_token_ids} - {None}
            self._renderer = ChatRenderer(tokenizer, stop_token_ids=stops, date=config.date)

    def play(
        self,
        engine: Generates,
        sampling: SamplingConfig,
        prompts: Sequence[Prompt],
        samples: int,
        draws: Draws,
        grader: Grader | None = None,
    ) -> Episodes:
        """See `Player.play`. Turn n of all unfinished episodes is one call of `generate`. An episode is cut off after
        the task's most turns, or where the prompt of its next turn would be longer than `max_prompt_tokens`, and where
        a step of its environment fails, see `EnvironmentConfig.step_timeout_s`."""
        task = self._task
        episodes = [
            _Running(prompt, sample, task.begin(prompt), prompt.prompt_ids)
            for prompt, sample in numbered(prompts, samples)
        ]
        try:
            active = list(episodes)
            for turn in range(task.max_turns):
                if not active:
                    break
                requests = [_request(running, draws, turn) for running in active]
                batch = engine.generate(requests, sampling, training=draws.stream == TRAINING)
                parts = [batch.select([number]) for number in range(len(active))]
                sampled = [part.response_ids(0) for part in parts]
                actions = said_aloud(self._tokenizer, [running.ids for running in active], sampled)
                answers, begun = task.episodes.step([running.episode for running in active], actions)
                for running, part, answer, episode in zip(active, parts, answers, begun, strict=True):
                    running.episode = episode
                    if _take(running, part, answer):
                        said = self._between(answer.observation, part)
                        running.ids = np.concatenate([running.ids, part.response_ids(0), said]).astype(np.int32)
                        running.known = len(running.ids) - len(said)
                unfinished = [r for r in active if not (r.ended or r.failed) and len(r.ids) <= self._max_prompt_tokens]
                task.episodes.end(running.episode for running in active if running not in unfinished)
                active = unfinished
        finally:
            task.episodes.end(running.episode for running in episodes)
        _report(episodes)
        return _joined(episodes, draws)

    def close(self) -> None:
        """Its processes are the task's."""

    def _between(self, observation: str, turn: RolloutBatch) -> np.ndarray:
        """Token ids int32 between a turn and the next: what the chat template writes there or, without one, the
        observation between line breaks."""
        if self._renderer is None:
            observation = split_special(self._tokenizer, observation)
            return encode_text(self._tokenizer, f"\n{observation}\n", continues=True)
        last = int(turn.token_ids[-1])
        closed = turn.finish_reasons[0] == "stop" and last in self._renderer.added.values()  # a word closes no message
        new = [Message("user", observation)]
        try:
            return self._renderer.after(Message("assistant"), new, None, self._given, last=last, closed=closed).ids
        except (CannotContinue, Refused) as error:
            raise UserError(
                f"the conversation with task.environment cannot be continued: {error}; use another template or "
                "task.chat_template=false"
            ) from error


def _joined(episodes: Sequence[_Running], draws: Draws) -> Episodes:
    batch = RolloutBatch.concatenate(
        [
            join_turns(
                running.turns,
                request_id=draws.name(running.prompt, running.sample),
                finish_reason="stop" if running.ended else "length",
            )
            for running in episodes
        ]
    )
    returns = np.array([running.total for running in episodes], dtype=np.float32)
    by_themselves = [all(part.finish_reasons[0] == "stop" for part in running.turns) for running in episodes]
    rewards = Rewards(
        reward=returns,
        correct=np.array([running.correct for running in episodes], dtype=bool),
        well_formed=np.array(by_themselves, dtype=bool),
        parts={PART: returns},
        verifier_errors=sum(running.failed is not None for running in episodes),
        errors={PART: sum(running.failed is not None for running in episodes)},
        timeouts={PART: sum(running.failed is not None and running.failed.timed_out for running in episodes)},
    )
    turns = np.array([len(running.turns) for running in episodes])
    return Episodes(batch, np.arange(len(episodes)), rewards, turns)


def _take(running: _Running, part: RolloutBatch, answer: Turn) -> bool:
    """A turn and what the environment answered; whether the episode goes on."""
    running.turns.append(part)
    if answer.error:
        running.failed = answer
        return False
    running.total += answer.reward
    if answer.ended:
        running.ended, running.correct = True, answer.won
    return not answer.ended


def _report(episodes: Sequence[_Running]) -> None:
    failed = [running.failed for running in episodes if running.failed is not None]
    if failed and len(failed) == len(episodes):
        raise UserError(f"task.environment failed in all {len(failed)} episodes: {failed[0].error}")
    if failed:
        logger.warning("the environment failed in %d of %d episodes: %s", len(failed), len(episodes), failed[0].error)


def _request(running: _Running, draws: Draws, turn: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"{draws.name(running.prompt, running.sample)}/{turn}",
        prompt_ids=running.ids,
        seed=draws.seed(running.prompt, running.sample, turn),
        known=running.known,
    )
