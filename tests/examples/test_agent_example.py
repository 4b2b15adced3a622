"""The agent with a Python tool: what its model is shown is what its agent does, token by token."""

from __future__ import annotations

import numpy as np
import pytest

from examples.agent.make_model import CALL, CALLED, CONFIG, Demonstrator, agent_tokenizer, result_of
from megatron_dppo.agents.python_tool import run_python
from megatron_dppo.config.load import load_config
from megatron_dppo.rollout.engine import SamplingConfig
from megatron_dppo.tasks.build import build_task
from megatron_dppo.trainer.agents import AgentPlayer
from megatron_dppo.trainer.requests import Draws
from tests.trainer.test_agents import Policy


class Shown(Policy):
    """Says what a demonstration says; samples 1 call with another number, samples 2 call what is no program."""

    def __init__(self, tokenizer, prompts) -> None:
        super().__init__(tokenizer)
        self.codes = {prompt.index: [prompt.metadata["expression"], "1 + 1", "1 +"] for prompt in prompts}
        self.results = {code: run_python(code, most=16) for codes in self.codes.values() for code in codes}

    def words(self, request) -> str:
        _, _, prompt, sample, turn = request.request_id.split("/")
        code = self.codes[int(prompt)][int(sample)]
        return f"{CALL}{code}{CALLED}" if turn == "0" else self.results[code]


def test_a_demonstration_is_an_episode() -> None:
    config, tokenizer = load_config(CONFIG), agent_tokenizer()
    task = build_task(config.task, tokenizer)
    prompts = task.prompts(0, 2)
    player = AgentPlayer(config.task, config.rollout, tokenizer, task.grader)
    try:
        episodes = player.play(Shown(tokenizer, prompts), SamplingConfig(max_tokens=24), prompts, 3, Draws(0, 0))
    finally:
        player.close()
        task.close()
    assert episodes.turns.tolist() == [2] * 6
    assert episodes.rewards.correct.tolist() == [True, False, False] * 2
    assert episodes.rewards.errors == {"agent": 0, "verifier": 0}
    batch = episodes.batch
    for number, prompt in enumerate(prompts):
        ids, own = Demonstrator([prompt], tokenizer, 0)._conversation(0.0)
        rows = slice(batch.offsets[3 * number], batch.offsets[3 * number + 1])
        assert batch.token_ids[rows].tolist() == ids
        np.testing.assert_array_equal(batch.loss_mask[rows], own)


@pytest.mark.parametrize("code", ["47 + 14 - 39", "-5 - 20", "12", "0 + 1", "07 + 1", "1 +", "1 + - 2", ""])
def test_sums_are_what_the_tool_says(code: str) -> None:
    assert result_of(code) == run_python(code, most=16)


def test_a_careless_call_has_one_other_digit_and_its_own_result() -> None:
    tokenizer = agent_tokenizer()
    task = build_task(load_config(CONFIG).task, tokenizer)
    prompts = task.prompts(0, 20)
    task.close()
    for prompt in prompts:
        ids, _ = Demonstrator([prompt], tokenizer, 1)._conversation(1.0)
        text = tokenizer.decode(ids)
        code = text.partition(CALL)[2].partition(CALLED)[0]
        assert sum(a != b for a, b in zip(code, prompt.metadata["expression"], strict=True)) == 1
        assert text.endswith(f"<|tool|>{run_python(code)}<|assistant|>{run_python(code)}<|end|>")
