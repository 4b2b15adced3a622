"""Procedural tasks of the reasoning-gym library, scored by its own verifiers."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_dppo.errors import UserError, did_you_mean
from megatron_dppo.tasks.config import TaskConfig
from megatron_dppo.tasks.prompt_set import PromptSet, drawn_sizes
from megatron_dppo.tasks.prompting import encode_prompt, user_message
from megatron_dppo.tasks.rewards.grader import build_grader
from megatron_dppo.tasks.rewards.gym import GymVerifier, gym_factory
from megatron_dppo.tasks.task import Prompt


def reasoning_gym_task(
    config: TaskConfig, tokenizer: PreTrainedTokenizerBase, *, max_prompt_tokens: int, max_response_tokens: int
) -> PromptSet:
    """A dataset of reasoning-gym.

    Questions are drawn by number until enough distinct ones are found; the first `held_out_size` are held out, the
    others are trained on. Two questions count as the same when their text or their prompt is the same, so no held-out
    prompt is ever trained on. Nothing here depends on the process, so every rank builds the same task.
    """
    held_out, wanted, draws = drawn_sizes(config)
    dataset = _create_dataset(config, size=draws)
    items = _distinct_items(dataset, config, wanted, draws)
    prompts = []
    for index, (message, entry) in enumerate(items):
        ids, text = encode_prompt(config, tokenizer, message)
        prompts.append(
            Prompt(
                index=index,
                prompt_ids=ids,
                text=text,
                question=entry["question"],
                answer=entry["answer"] or "",  # where many are right the library gives none
                metadata=entry["metadata"],
            )
        )
    _check_lengths(config, prompts, max_prompt_tokens)
    verifier = GymVerifier(config.dataset, {**config.parameters, "seed": config.seed, "size": draws})
    grader = build_grader(config, max_response_tokens=max_response_tokens, verifier=verifier)
    return PromptSet(prompts[:held_out], prompts[held_out:], config.seed, grader)


def _check_lengths(config: TaskConfig, prompts: list[Prompt], most: int) -> None:
    """The engine refuses longer prompts: a run would end at the first of them, hours after its start."""
    lengths = [len(prompt.prompt_ids) for prompt in prompts]
    too_long = sum(length > most for length in lengths)
    if too_long:
        raise UserError(
            f"task.dataset={config.dataset}: {too_long} of {len(prompts)} prompts are longer than "
            f"rollout.max_prompt_tokens={most}, the longest has {max(lengths)} tokens; raise it, or narrow "
            "task.parameters"
        )


def _create_dataset(config: TaskConfig, *, size: int) -> Any:
    factory = gym_factory()
    known = factory.DATASETS
    if config.dataset not in known:
        raise UserError(f"task.dataset={config.dataset!r} is not in reasoning-gym{_nearest(config.dataset, known)}")
    fields = {field.name for field in dataclasses.fields(known[config.dataset][1])} - {"seed", "size"}
    for name in config.parameters:
        if name not in fields:
            raise UserError(f"task.parameters.{name} is not a parameter of {config.dataset}{_nearest(name, fields)}")
    try:
        return factory.create_dataset(config.dataset, seed=config.seed, size=size, **config.parameters)
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(f"task.parameters are refused by {config.dataset}: {error}") from error


def _distinct_items(dataset: Any, config: TaskConfig, wanted: int, draws: int) -> list[tuple[str, dict[str, Any]]]:
    """`wanted` pairs (user message, item), no question and no message twice."""
    items: list[tuple[str, dict[str, Any]]] = []
    questions: set[str] = set()
    messages: set[str] = set()
    for number in range(draws):
        entry = dataset[number]
        message = user_message(config, entry["question"], entry["metadata"])
        if entry["question"] in questions or message in messages:
            continue
        questions.add(entry["question"])
        messages.add(message)
        items.append((message, entry))
        if len(items) == wanted:
            return items
    raise UserError(
        f"task.dataset={config.dataset} gave only {len(items)} distinct questions in {draws} draws, but "
        f"task.train_size + task.held_out_size = {wanted}; lower them or widen task.parameters"
    )


def _nearest(name: str, known: Any) -> str:
    return did_you_mean(name, known) or f"; known: {', '.join(sorted(known))}"
