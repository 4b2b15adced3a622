"""A task with the tokenizer that reads what the model wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from megatron_dppo.agents.response_text import response_texts
from megatron_dppo.config.schema import Config
from megatron_dppo.config.trainer import EvaluationConfig
from megatron_dppo.errors import UserError
from megatron_dppo.tasks.build import build_task
from megatron_dppo.tasks.config import TaskConfig
from megatron_dppo.tasks.data_task import load_prompts
from megatron_dppo.tasks.environments.environment_task import EnvironmentTask
from megatron_dppo.tasks.prompt_set import PromptSet
from megatron_dppo.tasks.rewards.grader import Grader, Judged, build_grader
from megatron_dppo.tasks.task import Prompt
from megatron_dppo.trainer.episodes import Player
from megatron_dppo.trainer.lockstep import EnvironmentPlayer


@dataclass(frozen=True)
class EvaluationSet:
    """Questions that are evaluated beside the task's own held-out ones."""

    name: str
    prompts: Sequence[Prompt]
    samples: int
    grader: Grader


@dataclass(frozen=True)
class TaskSuite:
    """Only the controller has one: prompts and verdicts are made once."""

    task: PromptSet
    tokenizer: PreTrainedTokenizerBase
    player: Player | None = None
    """Who plays its episodes; None where a response is all there is."""
    sets: Sequence[EvaluationSet] = ()
    report: Sequence[str] = ()
    """Lines for people: what the prompts are and what was left out."""

    def close(self) -> None:
        """End the processes that score."""
        if self.player is not None:
            self.player.close()
        self.task.close()
        for one in self.sets:
            one.grader.close()


def judge_responses(
    grader: Grader,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    samples: int,
    responses: Sequence[np.ndarray],
    finish_reasons: Sequence[str],
) -> Judged:
    """The verdicts on `responses`, the token ids of `samples` answers to each prompt in turn, and why each ended;
    `Grader.rewards` makes the rewards of all that are scored together."""
    texts = response_texts(tokenizer, responses)
    asked = [prompt for prompt in prompts for _ in range(samples)]
    return grader.judge(asked, texts, [len(ids) for ids in responses], finish_reasons)


def build_task_suite(config: Config, tokenizer: PreTrainedTokenizerBase) -> TaskSuite:
    """The task and the evaluation sets of a run. Raises UserError where there is nothing to evaluate on."""
    rollout, evaluation = config.rollout, config.evaluation
    most = {"max_prompt_tokens": rollout.max_prompt_tokens, "max_response_tokens": rollout.max_response_tokens}
    task = build_task(config.task, tokenizer, **most)
    grader = None if config.task.data is None else task.grader
    sets, report = build_sets(evaluation, config.task, tokenizer, **most, grader=grader)
    if evaluation.every and not sets and not (evaluation.prompts and task.held_out_size):
        raise UserError(
            f"evaluation.every={evaluation.every}, but there is nothing to evaluate: set task.held_out_size and "
            "evaluation.prompts, or evaluation.sets, or evaluation.every=0"
        )
    if evaluation.every and 0 < task.held_out_size < evaluation.prompts:
        raise UserError(
            f"evaluation.prompts={evaluation.prompts}, but task.held_out_size={task.held_out_size}; raise the latter, "
            "or lower the former"
        )
    lines, asked = [*task.report], config.trainer.prompts_per_step
    if asked > task.epoch_size:
        lines.append(
            f"  trainer.prompts_per_step={asked} is more than the {task.epoch_size} questions to train on: "
            "a step asks some of them again"
        )
    suite = TaskSuite(task, tokenizer, _player(config, task, tokenizer), sets, [*lines, *report])
    try:
        for one in (task.grader, *(one.grader for one in sets)):
            if one is not None:
                one.prepare()
                if config.trainer.resume:
                    one.trust()
    except BaseException:
        suite.close()
        raise
    return suite


def _player(config: Config, task: PromptSet, tokenizer: PreTrainedTokenizerBase) -> Player | None:
    if config.task.kind == "agent":
        from megatron_dppo.trainer.agents import AgentPlayer  # with a web server, which other runs do without

        return AgentPlayer(config.task, config.rollout, tokenizer, task.grader)
    if isinstance(task, EnvironmentTask):
        rollout = config.rollout
        return EnvironmentPlayer(
            task,
            config.task,
            tokenizer,
            max_prompt_tokens=rollout.max_prompt_tokens,
            stop_token_ids=rollout.stop_token_ids,
        )
    return None


def build_sets(
    evaluation: EvaluationConfig,
    task: TaskConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_tokens: int,
    max_response_tokens: int,
    grader: Grader | None,
) -> tuple[list[EvaluationSet], list[str]]:
    """The sets of `evaluation`, scored by `grader` or, without one, by one of their own; and their report."""
    if not evaluation.sets:
        return [], []
    if grader is None:
        rewards = task.rewards if task.data is not None else ()
        of_sets = task.model_copy(update={"rewards": rewards})
        grader = build_grader(of_sets, max_response_tokens=max_response_tokens)
    sets, lines = [], []
    for one in evaluation.sets:
        put = task if one.prompt is None else task.model_copy(update={"prompt": one.prompt})
        prompts, report = load_prompts(put, one.data, tokenizer, max_prompt_tokens)
        lines += [f"evaluation set {one.name}: {line}" for line in report.lines()]
        grader.check(prompts, of=f"evaluation set {one.name}: ")
        sets.append(EvaluationSet(one.name, prompts, one.samples or evaluation.samples, grader))
    return sets, lines
