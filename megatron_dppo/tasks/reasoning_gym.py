"""Procedural tasks of the reasoning-gym library, scored by its own verifiers."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import logging
import math
import re
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from megatron_dppo.errors import UserError
from megatron_dppo.tasks.config import TaskConfig
from megatron_dppo.tasks.prompting import encode_prompt, user_message
from megatron_dppo.tasks.task import Prompt, Rewards

logger = logging.getLogger(__name__)


class ReasoningGymTask:
    """A dataset of reasoning-gym as a `Task`.

    Questions are drawn by number until enough distinct ones are found; the first `held_out_size` are held out, the
    others are trained on. Two questions count as the same when their text or their prompt is the same, so no held-out
    prompt is ever trained on. Nothing here depends on the process, so every rank builds the same task.
    """

    def __init__(self, config: TaskConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._config = config
        wanted = config.held_out_size + config.train_size
        # A space of questions hardly larger than `wanted` repeats itself often before the last new one turns up.
        draws = 10 * wanted + 1000
        self._dataset = _create_dataset(config, size=draws)
        self._pattern = re.compile(config.answer_pattern, re.DOTALL)
        items = _distinct_items(self._dataset, config, wanted, draws)
        prompts = []
        for index, (message, entry) in enumerate(items):
            ids, text = encode_prompt(config, tokenizer, message)
            prompts.append(
                Prompt(
                    index=index,
                    prompt_ids=ids,
                    text=text,
                    question=entry["question"],
                    answer=entry["answer"],
                    metadata=entry["metadata"],
                )
            )
        self._held_out = prompts[: config.held_out_size]
        self._train = prompts[config.held_out_size :]
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))
        digest = hashlib.sha256(repr(config.seed).encode())
        for prompt in self._train:
            digest.update(prompt.prompt_ids.tobytes() + b"|")
        self._fingerprint = digest.hexdigest()

    @property
    def epoch_size(self) -> int:
        return len(self._train)

    @property
    def held_out_size(self) -> int:
        return len(self._held_out)

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    def prompts(self, start: int, count: int) -> list[Prompt]:
        if start < 0 or count < 0:
            raise ValueError(f"prompts({start}, {count}): positions and counts are not negative")
        size = self.epoch_size
        return [self._train[self._permutation(place // size)[place % size]] for place in range(start, start + count)]

    def held_out(self, count: int) -> list[Prompt]:
        if count > self.held_out_size:
            raise UserError(f"{count} held-out prompts are wanted, task.held_out_size={self.held_out_size}; raise it")
        return self._held_out[:count]

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> Rewards:
        if len(prompts) != len(responses):
            raise ValueError(f"{len(prompts)} prompts but {len(responses)} responses")
        reward = np.zeros(len(prompts), dtype=np.float32)
        well_formed = np.zeros(len(prompts), dtype=bool)
        errors = 0
        for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            match = self._pattern.fullmatch(response)
            if match is None or match["answer"] is None:
                continue
            well_formed[i] = True
            score = self._verify(prompt, match["answer"])
            if score is None:
                errors += 1
            else:
                reward[i] = score
        return Rewards(reward=reward, correct=reward >= 1, well_formed=well_formed, verifier_errors=errors)

    def _verify(self, prompt: Prompt, answer: str) -> float | None:
        """The dataset's own score in [0, 1]; None where its verifier fails, which depends on what the policy writes and
        must not end a run."""
        entry = {"question": prompt.question, "answer": prompt.answer, "metadata": prompt.metadata}
        try:
            score = float(self._dataset.score_answer(answer, entry))
        except Exception as error:
            logger.warning("the verifier of %s failed on %r: %r", self._config.dataset, answer, error)
            return None
        if not math.isfinite(score):
            logger.warning("the verifier of %s scored %r with %s", self._config.dataset, answer, score)
            return None
        return score

    def _permutation(self, epoch: int) -> np.ndarray:
        if self._order[0] != epoch:
            order = np.random.default_rng((self._config.seed, epoch)).permutation(self.epoch_size)
            self._order = (epoch, order)
        return self._order[1]


def _create_dataset(config: TaskConfig, *, size: int) -> Any:
    with warnings.catch_warnings():
        # A dependency of the library has a doubtful comparison in its source, reported on first import.
        warnings.simplefilter("ignore", SyntaxWarning)
        from reasoning_gym.factory import DATASETS, create_dataset
    if config.dataset not in DATASETS:
        raise UserError(f"task.dataset={config.dataset!r} is not in reasoning-gym{_nearest(config.dataset, DATASETS)}")
    fields = {field.name for field in dataclasses.fields(DATASETS[config.dataset][1])} - {"seed", "size"}
    for name in config.parameters:
        if name not in fields:
            raise UserError(f"task.parameters.{name} is not a parameter of {config.dataset}{_nearest(name, fields)}")
    try:
        return create_dataset(config.dataset, seed=config.seed, size=size, **config.parameters)
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
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(sorted(known))}"
