"""A stream continues where its state was taken, and only over the same prompts."""

from __future__ import annotations

import json

import pytest

from megatron_dppo.errors import UserError
from megatron_dppo.tasks.build import build_task
from megatron_dppo.tasks.config import TaskConfig
from megatron_dppo.tasks.stream import PromptStream


@pytest.fixture(scope="module")
def task(tokenizer):
    return build_task(TaskConfig(train_size=10, held_out_size=4), tokenizer)


def test_a_restored_stream_gives_the_very_next_prompt(task):
    stream = PromptStream(task)
    taken = [p.index for p in stream.take(7)]
    state = json.loads(json.dumps(stream.state()))  # plain data
    rest = [p.index for p in stream.take(9)]
    resumed = PromptStream(task)
    resumed.restore(state)
    assert resumed.position == 7
    assert [p.index for p in resumed.take(9)] == rest
    assert sorted(taken + rest[:3]) == list(range(4, 14))
    assert (stream.position, stream.epoch) == (16, 1)


def test_other_prompts_are_refused(task, tokenizer):
    state = PromptStream(task, position=3).state()
    other = PromptStream(build_task(TaskConfig(train_size=10, held_out_size=4, seed=5), tokenizer))
    with pytest.raises(UserError, match="other prompts"):
        other.restore(state)
