"""Questions from files or datasets as a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from megatron_dppo.errors import UserError, listed
from megatron_dppo.tasks.config import TaskConfig
from megatron_dppo.tasks.data.config import DataConfig, text_at
from megatron_dppo.tasks.data.examples import DataReport, read_examples
from megatron_dppo.tasks.prompt_set import PromptSet
from megatron_dppo.tasks.prompting import encode_prompt, user_message
from megatron_dppo.tasks.rewards.config import MathVerifyReward
from megatron_dppo.tasks.rewards.grader import build_grader
from megatron_dppo.tasks.rewards.math import meets_itself
from megatron_dppo.tasks.task import Prompt

_MOST_CHARACTERS = 1_000_000
"""Of a question that is put to the tokenizer, where `max_prompt_tokens` is no larger."""


def data_task(
    config: TaskConfig, tokenizer: PreTrainedTokenizerBase, *, max_prompt_tokens: int, max_response_tokens: int
) -> PromptSet:
    """The questions of `task.data`. Which are held out, and the order of each epoch, follow from the seed;
    a question has the number of its place in the source, so that other seeds do not rename it."""
    assert config.data is not None  # the configuration's own check
    prompts, report = load_prompts(config, config.data, tokenizer, max_prompt_tokens)
    held_out = config.held_out_size or 0
    wanted = held_out + (config.train_size or 1)
    if wanted > len(prompts):
        raise UserError(
            f"task.held_out_size={held_out} and task.train_size={config.train_size or 'at least 1'} want {wanted} "
            f"questions, but {config.data.path} has {len(prompts)}; lower them"
        )
    order = np.random.default_rng(config.seed).permutation(len(prompts))
    stop = None if config.train_size is None else held_out + config.train_size
    chosen = [prompts[i] for i in order[:stop]]
    counts = f"  {len(chosen) - held_out:,} to train on, {held_out:,} held out (task.seed)"
    grader = build_grader(config, max_response_tokens=max_response_tokens)
    train, repeated = _as_often(chosen[held_out:], config.repeat)
    idle = [
        f"  the reward {one.label} is for none of the training questions: {one.when} (task.rewards)"
        for one in config.rewards
        if not any(one.is_for(prompt.metadata) for prompt in train)
    ]
    return PromptSet(chosen[:held_out], train, config.seed, grader, [*report.lines(), counts, *repeated, *idle])


def _as_often(prompts: Sequence[Prompt], repeat: Mapping[str, Mapping[str, int]]) -> tuple[list[Prompt], list[str]]:
    """The prompts of an epoch, each as often as `task.repeat` says, and a line for each entry of that. Raises UserError
    for one that no prompt fits."""
    times, lines = np.ones(len(prompts), dtype=np.int64), []
    for field, of_values in repeat.items():
        values = [text_at(prompt.metadata, field) for prompt in prompts]
        for value, count in of_values.items():
            fitting = np.array([one == value for one in values])
            if not fitting.any():
                has = listed(sorted({str(one) for one in values if one is not None}), 5) or "no row has it"
                raise UserError(f"task.repeat.{field}.{value}: no training question has it; {field} is: {has}")
            times[fitting] *= count
            lines.append(f"  {fitting.sum():,} with {field}={value} come {count} times as often (task.repeat)")
    if lines:
        lines.append(f"  {times.sum():,} in an epoch")
    return [prompt for prompt, count in zip(prompts, times, strict=True) for _ in range(count)], lines


def load_prompts(
    config: TaskConfig, data: DataConfig, tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int
) -> tuple[list[Prompt], DataReport]:
    """The prompts of `data` in the order of its rows, put to the model as `config` says; those longer than
    `max_prompt_tokens` are left out and counted. Raises UserError where none is left, and for rows that are broken."""
    examples, report = read_examples(data)
    prompts: list[Prompt] = []
    mathematics = [one for one in config.rewards or (MathVerifyReward(),) if isinstance(one, MathVerifyReward)]
    for example in examples:
        characters = sum(len(message["content"]) for message in example.messages)
        if characters > max(_MOST_CHARACTERS, 32 * max_prompt_tokens):  # to tokenize it would take minutes
            report.too_long.append(f"{example.where} ({characters:,} characters)")
            continue
        try:
            message = user_message(config, example.question, example.metadata)
            ids, text = encode_prompt(config, tokenizer, [*example.messages[:-1], {"role": "user", "content": message}])
        except UserError as error:
            raise UserError(f"{example.where}: {error}") from error
        if len(ids) > max_prompt_tokens:
            report.too_long.append(f"{example.where} ({len(ids)} tokens)")
            continue
        by_mathematics = any(one.is_for(example.metadata) for one in mathematics)
        if by_mathematics and not any(map(meets_itself, (example.answer, *example.also_accepted))):
            report.unmeetable.append(f"{example.where} ({example.answer[:40]!r})")
        prompts.append(
            Prompt(
                index=len(prompts) + len(report.too_long),
                prompt_ids=ids,
                text=text,
                question=example.question,
                answer=example.answer,
                also_accepted=example.also_accepted,
                metadata=example.metadata,
            )
        )
    if not prompts:
        raise UserError(
            f"{data.path}: all {len(examples)} prompts are longer than rollout.max_prompt_tokens={max_prompt_tokens}"
        )
    return prompts, replace(report, kept=len(prompts))
