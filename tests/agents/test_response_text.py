"""What rewards and environments read of what five families write: never what was thought."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from tokenizers import AddedToken

from megatron_dppo.agents.response_text import response_texts, said_aloud
from megatron_dppo.tasks.config import TaskConfig
from megatron_dppo.tasks.rewards.grader import build_grader
from megatron_dppo.tasks.task import Prompt
from megatron_dppo.trainer.task_suite import judge_responses
from tests.agents.families import FAMILIES, tokenizer_of

THOUGHT, SAID, CALLED = "<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>final<|message|>", "<|return|>"


def ids_of(tokenizer, text: str) -> np.ndarray:
    return np.array(tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)


def written(name: str, thought: str, said: str | None) -> str:
    """As the family writes it; `said` None: the answer ends with the thinking."""
    if name == "gpt_oss":
        return f"{THOUGHT}{thought}<|end|>{SAID}{said}{CALLED}" if said is not None else f"{THOUGHT}{thought}{CALLED}"
    stop = FAMILIES[name].stops[0]
    return f"<think>\n{thought}\n</think>\n\n{said}{stop}" if said is not None else f"<think>\n{thought}{stop}"


@pytest.mark.parametrize("name", ["qwen3", "glm4", "deepseek_v3_1", "gpt_oss"])
def test_nobody_is_paid_for_thinking(name: str) -> None:
    tokenizer = tokenizer_of(name)
    texts = [
        written(name, "So \\boxed{42}.", "The answer is 41."),
        written(name, "So \\boxed{42}.", "I do not know."),
        written(name, "So \\boxed{42}.", None),
        written(name, "So \\boxed{41}.", "\\boxed{42}"),
    ]
    prompt = Prompt(index=0, prompt_ids=np.ones(1, np.int32), text="q", question="q", answer="42")
    grader = build_grader(TaskConfig(kind="data", data={"path": "x.jsonl"}), max_response_tokens=100)
    try:
        responses = [ids_of(tokenizer, text) for text in texts]
        judged = judge_responses(grader, tokenizer, [prompt], len(texts), responses, ["stop"] * len(texts))
        rewards = grader.rewards(judged)
    finally:
        grader.close()
    assert rewards.reward.tolist() == [0, 0, 0, 1]
    prompts = [ids_of(tokenizer, "q")] * len(texts)
    assert said_aloud(tokenizer, prompts, responses) == ["The answer is 41.", "I do not know.", "", "\\boxed{42}"]


def test_thinking_that_the_prompt_begins() -> None:
    tokenizer = tokenizer_of("qwen3")
    prompts = [ids_of(tokenizer, "<|im_start|>assistant\n<think>\n")] * 2
    responses = [ids_of(tokenizer, "hm 1\n</think>\n2<|im_end|>"), ids_of(tokenizer, "hm 1<|im_end|>")]
    assert said_aloud(tokenizer, prompts, responses) == ["2", ""]


def test_a_tag_that_is_a_special_token_is_shown_and_no_other() -> None:
    tokenizer = copy.deepcopy(tokenizer_of("llama3"))
    tokenizer.add_tokens([AddedToken(tag, special=True, normalized=False) for tag in ("[THINK]", "[/THINK]")])
    ids = ids_of(tokenizer, "[THINK]hm 1[/THINK]2 fox<|eot_id|>")
    assert response_texts(tokenizer, [ids]) == ["[THINK]hm 1[/THINK]2 fox"]
    assert said_aloud(tokenizer, [ids_of(tokenizer, "q")], [ids]) == ["2 fox"]
    without = ids_of(tokenizer, "so <|python_tag|>the answer<|eot_id|>")
    assert response_texts(tokenizer, [without]) == [tokenizer.decode(without, skip_special_tokens=True)]


def test_gpt_oss_in_other_orders() -> None:
    tokenizer = tokenizer_of("gpt_oss")
    texts = {
        "41": "41",
        f"{THOUGHT}a<|end|><|start|>assistant{THOUGHT}b<|end|>{SAID}c": "<think>\na\nb\n</think>\nc",
        f"<|channel|>final<|message|>c{CALLED}": "c",
        f"{THOUGHT}a </think> \\boxed{{1}}": "<think>\na </think> \\boxed{1}\n</think>\n",
    }
    assert response_texts(tokenizer, [ids_of(tokenizer, text) for text in texts]) == list(texts.values())
