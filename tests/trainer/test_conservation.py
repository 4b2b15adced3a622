"""What a step refuses to train on."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_dppo.tasks.prompt_set import PromptSet
from megatron_dppo.tasks.task import Prompt
from megatron_dppo.trainer.requests import Draws, requests_for
from megatron_dppo.trainer.rollouts import _groups_that_came

ASKED = [f"{group}/{sample}" for group in range(4) for sample in range(2)]


def test_whole_groups_in_order_are_taken() -> None:
    assert _groups_that_came(ASKED, ASKED, 2, 4) == [0, 1, 2, 3]
    assert _groups_that_came(ASKED, [*ASKED[:2], *ASKED[4:6]], 2, 2) == [0, 2]


@pytest.mark.parametrize(
    ("came", "message"),
    [
        ([*ASKED, "9/0"], "1 answers came that nobody asked for, first 9/0"),
        ([*ASKED[:6], *ASKED[:2]], r"8 came, 6 of them different"),
        (ASKED[:7], "7 came, 7 of them different"),
        (ASKED[:6], "not 4 whole groups"),
        ([ASKED[1], ASKED[0], *ASKED[2:]], "in the order asked for"),
        ([*ASKED[2:4], *ASKED[:2], *ASKED[4:]], "in the order asked for"),
        ([ASKED[0], ASKED[2], *ASKED[4:], ASKED[1], ASKED[3]], "whole groups"),
    ],
)
def test_lost_doubled_torn_and_foreign_answers_fail_the_step(came: list[str], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        _groups_that_came(ASKED, came, 2, 4)


def test_a_step_over_the_end_of_an_epoch_asks_for_every_answer_under_a_name_and_a_seed_of_its_own() -> None:
    questions = [
        Prompt(index=i, prompt_ids=np.array([i], dtype=np.int32), text="", question="", answer="", metadata={})
        for i in range(6)
    ]
    prompts = PromptSet([], questions, seed=0).prompts(4, 6)
    assert len({prompt.index for prompt in prompts}) < len(prompts), "no prompt comes twice in this step"
    requests = requests_for(prompts, 2, Draws(0, 1))
    names = [request.request_id for request in requests]
    assert len(set(names)) == len({request.seed for request in requests}) == len(requests) == 12
    assert _groups_that_came(names, names, 2, 6) == list(range(6))
    once = requests_for(prompts[:1], 2, Draws(0, 1))
    assert [(r.request_id, r.seed) for r in requests[:2]] == [(r.request_id, r.seed) for r in once]
