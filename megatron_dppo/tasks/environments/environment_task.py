"""Episodes of an environment as something to train on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from megatron_dppo.errors import UserError
from megatron_dppo.tasks.config import TaskConfig
from megatron_dppo.tasks.environments.make import environment_maker, own_random_state
from megatron_dppo.tasks.environments.protocol import Environment, observation_text
from megatron_dppo.tasks.environments.turns import TurnEncoder
from megatron_dppo.tasks.prompt_set import PromptSet
from megatron_dppo.tasks.prompting import encode_prompt, user_message
from megatron_dppo.tasks.task import Prompt

TRAIN_SIZE, HELD_OUT_SIZE = 2048, 256
"""Initial states, where the configuration does not say."""


@dataclass(frozen=True)
class Turn:
    """What an environment answered: `observation` as the policy reads it."""

    observation: str
    reward: float
    terminated: bool
    truncated: bool


class Episode:
    """One environment under way. Everything it does to the global random generators stays inside."""

    def __init__(self, environment: Environment, name: str) -> None:
        self._environment, self._name = environment, name

    def reset(self, seed: int) -> str:
        """Start from the initial state of `seed`; returns the first observation."""
        with own_random_state():
            observation, info = self._environment.reset(seed=seed)
        return self._text(observation, info)

    def step(self, action: str) -> Turn:
        """Raises UserError for a reward that is no finite number."""
        with own_random_state():
            observation, reward, terminated, truncated, info = self._environment.step(action)
        value = float(reward)
        if not np.isfinite(value):
            raise UserError(f"{self._name}.step({action!r:.60}) gave the reward {value}; it must be a finite number")
        return Turn(self._text(observation, info), value, bool(terminated), bool(truncated))

    def _text(self, observation: Any, info: Any) -> str:
        if not isinstance(observation, str):
            raise UserError(f"{self._name} gave the observation {observation!r:.60}; it must be text")
        return observation_text(observation, info or {})


class EnvironmentTask:
    """Initial states of an environment as `Prompts`, a training and a held-out set. The number of a prompt decides the
    seed of its episodes, so all samples of a prompt start alike."""

    def __init__(self, config: TaskConfig, tokenizer: PreTrainedTokenizerBase, *, max_prompt_tokens: int) -> None:
        assert config.environment is not None  # the configuration's own check
        self._name = config.environment.name
        self._seed = config.seed
        self._make = environment_maker(config.environment)
        self.max_turns = config.environment.max_turns
        self.turns = TurnEncoder(config, tokenizer)
        held_out = HELD_OUT_SIZE if config.held_out_size is None else config.held_out_size
        prompts = self._distinct(config, tokenizer, held_out + (config.train_size or TRAIN_SIZE), max_prompt_tokens)
        self._set = PromptSet(prompts[:held_out], prompts[held_out:], config.seed)
        self.epoch_size, self.held_out_size = self._set.epoch_size, self._set.held_out_size
        self.fingerprint = self._set.fingerprint
        self.prompts, self.held_out = self._set.prompts, self._set.held_out

    def begin(self, prompt: Prompt) -> Episode:
        """A new episode in the state that `prompt` describes."""
        episode = Episode(self._make(), self._name)
        episode.reset(int(prompt.metadata["seed"]))
        return episode

    def report(self) -> list[str]:
        return []

    def close(self) -> None:
        """Nothing outlives an episode."""

    def _distinct(
        self, config: TaskConfig, tokenizer: PreTrainedTokenizerBase, wanted: int, max_prompt_tokens: int
    ) -> list[Prompt]:
        prompts: list[Prompt] = []
        seen: set[str] = set()
        episode = Episode(self._make(), self._name)
        draws = 10 * wanted + 1000
        for number in range(draws):
            seed = int(np.random.SeedSequence((self._seed, number)).generate_state(1)[0])
            observation = episode.reset(seed)
            if observation in seen:
                continue
            seen.add(observation)
            ids, text = encode_prompt(config, tokenizer, user_message(config, observation, {"seed": seed}))
            if len(ids) > max_prompt_tokens:
                raise UserError(
                    f"{self._name} begins with {len(ids)} tokens, rollout.max_prompt_tokens={max_prompt_tokens}; in an "
                    "environment it must hold all turns but the last"
                )
            prompts.append(
                Prompt(
                    index=len(prompts),
                    prompt_ids=ids,
                    text=text,
                    question=observation,
                    answer="",
                    metadata={"seed": seed},
                )
            )
            if len(prompts) == wanted:
                return prompts
        raise UserError(
            f"{self._name} gave only {len(prompts)} distinct initial states in {draws} draws, but task.train_size + "
            f"task.held_out_size = {wanted}; lower them"
        )
