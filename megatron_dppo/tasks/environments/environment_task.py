"""Episodes of an environment as something to train on."""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedTokenizerBase

from megatron_dppo.errors import UserError
from megatron_dppo.tasks.config import TaskConfig
from megatron_dppo.tasks.environments.episode import Begun, Episode, Episodes
from megatron_dppo.tasks.environments.make import environment_maker
from megatron_dppo.tasks.prompt_set import PromptSet, drawn_sizes
from megatron_dppo.tasks.prompting import encode_prompt, encode_text, render, split_special, user_message
from megatron_dppo.tasks.task import Prompt

_MARK = "THE ASSISTANT SAID THIS"


class TurnEncoder:
    """Encodes observations for a conversation that is never tokenized twice: tokens of earlier turns stay the ones that
    were sampled, and the environment's are appended."""

    def __init__(self, config: TaskConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._chat, self._tokenizer, self._date = config.chat_template, tokenizer, config.date
        self._given = config.chat_template_kwargs

    def between(self, observation: str, last_sampled: int) -> np.ndarray:
        """Token ids int32 to put after a turn that ended with the token `last_sampled`.

        With a chat template: the end of the assistant's turn (without the token that closes it, where the policy wrote
        it itself), the observation as the user's turn, and the opening of the assistant's. Without: the observation
        between line breaks.
        """
        observation = split_special(self._tokenizer, observation)
        if not self._chat:
            return encode_text(self._tokenizer, f"\n{observation}\n", continues=True)
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": _MARK},
            {"role": "user", "content": observation},
        ]
        text = render(self._tokenizer, messages, date=self._date, given=self._given)
        _, mark, after = text.partition(_MARK)
        if not mark or _MARK in after:
            raise UserError(
                "the tokenizer's chat template does not show an assistant's message as it is, so a conversation cannot "
                "be continued; use another template or task.chat_template=false"
            )
        ids = encode_text(self._tokenizer, after, continues=True)
        return ids[1:] if len(ids) and ids[0] == last_sampled else ids


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
        self.turns = TurnEncoder(config, tokenizer)
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
