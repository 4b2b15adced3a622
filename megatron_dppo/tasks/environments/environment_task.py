"""Episodes of an environment as something to train on."""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedTokenizerBase

from megatron_dppo.errors import UserError
from megatron_dppo.tasks.config import TaskConfig
from megatron_dppo.tasks.environments.episode import Begun, Episode, Episodes
from megatron_dppo.tasks.environments.make import environment_maker
from megatron_dppo.tasks.prompt_set import PromptSet, drawn_sizes
from megatron_dppo.tasks.prompting import encode_prompt, user_message
from megatron_dppo.tasks.task import Prompt


class EnvironmentTask(PromptSet):
    """Initial states of an environment as prompts, a training and a held-out set. The number of a prompt decides the
    seed of its episodes, so all samples of a prompt start alike."""

    def __init__(self, config: TaskConfig, tokenizer: PreTrainedTokenizerBase, *, max_prompt_tokens: int) -> None:
        assert config.environment is not None  # the configuration's own check
        self._name = config.environment.name
        self._seed, self._hidden_state = config.seed, config.environment.hidden_state
        self._make = environment_maker(config.environment)
        self.episodes = Episodes(config.environment, config.reward_workers, config.reward_memory_mib)
        self.max_turns = config.environment.max_turns
        held_out, wanted, draws = drawn_sizes(config)
        prompts = self._distinct(config, tokenizer, wanted, draws, max_prompt_tokens)
        super().__init__(prompts[:held_out], prompts[held_out:], config.seed)

    def begin(self, prompt: Prompt) -> Begun:
        """A new episode in the state that `prompt` describes."""
        return self.episodes.begin(int(prompt.metadata["seed"]))

    def close(self) -> None:
        """End the workers."""
        self.episodes.close()

    def _distinct(
        self, config: TaskConfig, tokenizer: PreTrainedTokenizerBase, wanted: int, draws: int, max_prompt_tokens: int
    ) -> list[Prompt]:
        prompts: list[Prompt] = []
        seen: set[str] = set()
        episode = Episode(self._make(), self._name)
        for number in range(draws):
            seed = int(np.random.SeedSequence((self._seed, number)).generate_state(1)[0])
            observation = episode.reset(seed)
            if observation in seen and not self._hidden_state:
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
            f"task.held_out_size = {wanted}; lower them, or set task.environment.hidden_state=true if seeds that begin "
            "alike go on differently"
        )
