"""Two turns with an environment, in the words of five families: the first turn's tokens as they were sampled, and what
a chat template puts behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from megatron_dppo.batch import RolloutBatch
from megatron_dppo.errors import UserError
from megatron_dppo.rollout.engine import SamplingConfig
from megatron_dppo.tasks.config import TaskConfig
from megatron_dppo.tasks.environments.environment_task import EnvironmentTask
from megatron_dppo.trainer.lockstep import EnvironmentPlayer
from megatron_dppo.trainer.requests import Draws
from tests.agents.families import FAMILIES, stop_ids, tokenizer_of
from tests.agents.test_rendering import EXPECTED
from tests.tasks.environments.test_environments import Scripted

FACTORY = "tests.tasks.environments.counting:Counting"


class Cut(Scripted):
    """Its turns end for want of tokens."""

    def generate(self, requests, sampling, *, training) -> RolloutBatch:
        batch = super().generate(requests, sampling, training=training)
        return replace(batch, finish_reasons=("length",) * len(batch))


def second_prompt(tokenizer, policy_class: type[Scripted], said: str, stops: Sequence[int], **settings) -> str:
    """What stands before the second turn, behind the first prompt."""
    environment = {"name": "counting", "factory": FACTORY, "max_turns": 2, "sandbox": "none"}
    config = TaskConfig(
        kind="environment", environment=environment, train_size=1, held_out_size=1, reward_workers=1, **settings
    )
    task = EnvironmentTask(config, tokenizer, max_prompt_tokens=8192)
    try:
        (prompt,) = task.prompts(0, 1)
        policy = policy_class(tokenizer, {prompt.index: [said, said]})
        player = EnvironmentPlayer(task, config, tokenizer, max_prompt_tokens=8192, stop_token_ids=stops)
        player.play(policy, SamplingConfig(), [prompt], 1, Draws(1, 1))
    finally:
        task.close()
    first, second = policy.requests[0][0].prompt_ids, policy.requests[1][0].prompt_ids
    assert second[: len(first)].tolist() == first.tolist()
    seed = f"seed {prompt.metadata['seed']} step 1 heard "
    return str(tokenizer.decode(second[len(first) :])).replace(seed, "heard ")


THINKING = {
    "qwen3": "<think>\nhm\n</think>\n\n",
    "gpt_oss": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant",
}


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_turn_that_the_policy_closed(name: str) -> None:
    """Its closing is not written twice, gpt-oss's neither, which is another than that of a history."""
    family = FAMILIES[name]
    said = f"{THINKING.get(name, '')}{family.answer if name == 'gpt_oss' else ''}go"
    after = EXPECTED[name][0].replace("U", "heard go", 1) if name != "deepseek_v3_1" else None
    found = second_prompt(tokenizer_of(name), Scripted, said, stop_ids(name))
    assert found == said + family.stops[0] + (after or "<｜User｜>heard go<｜Assistant｜></think>")


def test_a_turn_that_was_cut_is_closed() -> None:
    tokenizer = tokenizer_of("llama3")
    found = second_prompt(tokenizer, Cut, "go", stop_ids("llama3"))
    assert found == "go<|eot_id|>" + EXPECTED["llama3"][1].replace("U", "heard go")


def test_what_a_template_is_given_it_is_given_between_turns_too() -> None:
    found = second_prompt(
        tokenizer_of("qwen3"), Scripted, "go", stop_ids("qwen3"), chat_template_kwargs={"enable_thinking": False}
    )
    assert found.endswith("heard go<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_without_a_template_it_stands_between_line_breaks() -> None:
    found = second_prompt(tokenizer_of("llama3"), Scripted, "go", (), chat_template=False)
    assert found == "go<|eot_id|>\nheard go\n"


def test_a_template_that_shows_no_answer_is_refused() -> None:
    tokenizer = type(tokenizer_of("llama3"))(tokenizer_object=tokenizer_of("llama3").backend_tokenizer)
    tokenizer.chat_template = "{% for m in messages if m.role == 'user' %}U {{ m.content }}\n{% endfor %}A "
    tokenizer.eos_token = "<|eot_id|>"
    with pytest.raises(
        UserError, match=r"cannot be continued: .*does not show an assistant's message.*chat_template=f"
    ):
        second_prompt(tokenizer, Scripted, "go", ())
