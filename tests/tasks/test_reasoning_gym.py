"""Prompts of a reasoning-gym task: apart, repeatable, in the tokenizer's own words; and its verifier as the reward."""

from __future__ import annotations

import dataclasses
import json
import re
import time

import numpy as np
import pytest
from pydantic import ValidationError

from megatron_dppo.errors import UserError
from megatron_dppo.tasks.build import build_task
from megatron_dppo.tasks.config import TaskConfig


@pytest.fixture(scope="module")
def task(sums, tokenizer):
    return build_task(sums, tokenizer)


def changed(config: TaskConfig, **changes) -> TaskConfig:
    return TaskConfig(**{**config.model_dump(), **changes})


def test_held_out_questions_are_never_trained_on(task, sums):
    train = task.prompts(0, 3 * task.epoch_size)
    held_out = task.held_out(sums.held_out_size)
    assert len({p.question for p in train}) == task.epoch_size == sums.train_size
    assert len({p.question for p in held_out}) == len(held_out) == sums.held_out_size
    for key in ("question", "text", "index"):
        assert not {getattr(p, key) for p in train} & {getattr(p, key) for p in held_out}


def test_draws_that_repeat_are_found_and_dropped(tokenizer):
    """Of the 200 questions with two one-digit numbers, 190 are wanted: nearly every draw is a repeat by then."""
    config = TaskConfig(
        parameters={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, train_size=140, held_out_size=50
    )
    task = build_task(config, tokenizer)
    questions = [p.question for p in task.prompts(0, 140) + task.held_out(50)]
    assert len(set(questions)) == 190


def test_prompts_that_read_the_same_count_as_the_same_question(tokenizer):
    """The prompt shows less than the question, so different questions look alike to the model."""
    config = TaskConfig(
        prompt="{metadata[num_terms]}", parameters={"min_terms": 2, "max_terms": 6}, train_size=3, held_out_size=2
    )
    task = build_task(config, tokenizer)
    assert len({p.text for p in task.prompts(0, 3) + task.held_out(2)}) == 5


def test_a_prompt_that_the_engine_would_refuse_is_an_error_at_the_start(sums, tokenizer, task):
    """One rare long question ends a run when its turn comes."""
    prompts = task.prompts(0, task.epoch_size) + task.held_out(task.held_out_size)
    longest = max(len(prompt.prompt_ids) for prompt in prompts)
    build_task(sums, tokenizer, max_prompt_tokens=longest)
    reached = sum(len(prompt.prompt_ids) == longest for prompt in prompts)
    with pytest.raises(UserError, match=rf"{reached} of 1700 prompts .*max_prompt_tokens={longest - 1}, .* {longest} "):
        build_task(sums, tokenizer, max_prompt_tokens=longest - 1)


def test_too_few_distinct_questions_are_an_error(tokenizer):
    config = TaskConfig(
        parameters={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, train_size=200, held_out_size=50
    )
    with pytest.raises(UserError, match=r"only \d+ distinct questions.*train_size"):
        build_task(config, tokenizer)


def test_every_epoch_is_a_permutation_and_epochs_differ(task):
    size = task.epoch_size
    first = [p.index for p in task.prompts(0, size)]
    second = [p.index for p in task.prompts(size, size)]
    assert sorted(first) == sorted(second) == list(range(task.held_out_size, task.held_out_size + size))
    assert first != second


def test_any_position_gives_the_same_prompts_in_any_process(task, sums, tokenizer):
    rebuilt = build_task(sums, tokenizer)
    start, count = task.epoch_size - 3, 7  # over the end of an epoch
    ours, theirs = task.prompts(start, count), rebuilt.prompts(start, count)
    assert [p.index for p in ours] == [p.index for p in theirs]
    assert [p.index for p in task.prompts(0, start + count)[start:]] == [p.index for p in ours]
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a.prompt_ids, b.prompt_ids)
    assert task.fingerprint == rebuilt.fingerprint


def test_another_seed_gives_other_questions_and_another_order(task, sums, tokenizer):
    other = build_task(changed(sums, seed=1), tokenizer)
    assert other.fingerprint != task.fingerprint
    assert [p.question for p in other.held_out(20)] != [p.question for p in task.held_out(20)]


def test_prompt_is_the_chat_template_around_the_message(task, tokenizer):
    prompt = task.held_out(1)[0]
    assert prompt.prompt_ids.dtype == np.int32
    assert prompt.text == f"<|user|>{prompt.metadata['expression']}<|assistant|>"
    assert tokenizer.decode(prompt.prompt_ids) == prompt.text
    assert prompt.metadata["expression"] in prompt.question
    assert eval(prompt.metadata["expression"]) == int(prompt.answer)


def test_system_prompt_and_plain_text(sums, tokenizer):
    small = {"train_size": 2, "held_out_size": 1}
    chat = build_task(changed(sums, system_prompt="Add.", **small), tokenizer).held_out(1)[0]
    plain = build_task(changed(sums, system_prompt="Add.", chat_template=False, **small), tokenizer).held_out(1)[0]
    expression = chat.metadata["expression"]
    assert chat.text == f"<|system|>Add.<|user|>{expression}<|assistant|>"
    assert tokenizer.decode(plain.prompt_ids) == plain.text == f"Add.\n{expression}"


def test_verdicts(task):
    prompt = next(p for p in task.prompts(0, 100) if len(p.answer) == 1 and p.answer != "0")
    wrong = str(int(prompt.answer) + 1)
    responses = [prompt.answer, wrong, "", "-", "12-", f" {prompt.answer}", f"{prompt.answer}\n{prompt.answer}"]
    verdict = task.grader.score([prompt] * len(responses), responses)
    assert verdict.correct.tolist() == [True] + [False] * 6
    assert verdict.reward.tolist() == [1.0] + [0.0] * 6
    assert verdict.well_formed.tolist() == [True, True] + [False] * 5
    assert verdict.reward.dtype == np.float32
    assert len(verdict) == 7
    assert verdict.verifier_errors == 0


def test_reward_is_the_verifiers_own_partial_credit(task):
    """reasoning-gym's chain_sum gives an answer that contains the right one its share of the length."""
    prompt = next(p for p in task.prompts(0, 100) if len(p.answer) == 1 and p.answer != "0")
    verdict = task.grader.score([prompt], [f"{prompt.answer}{prompt.answer}"])
    assert verdict.reward.tolist() == [0.5]
    assert not verdict.correct[0]


def test_answers_come_from_the_pattern(sums, tokenizer):
    tagged = changed(sums, answer_pattern=r".*<answer>(?P<answer>.*?)</answer>\s*", train_size=2, held_out_size=1)
    task = build_task(tagged, tokenizer)
    prompt = task.held_out(1)[0]
    responses = [f"so\nthat <answer>{prompt.answer}</answer>\n", prompt.answer, "<answer>1000</answer>"]
    verdict = task.grader.score([prompt] * 3, responses)
    assert verdict.correct.tolist() == [True, False, False]
    assert verdict.well_formed.tolist() == [True, False, True]


def test_every_prompts_reference_answer_is_right_and_only_its_own(task):
    prompts = task.held_out(200)
    assert task.grader.score(prompts, [p.answer for p in prompts]).correct.all()
    shifted = [str(int(p.answer) + 100) for p in prompts]
    assert not task.grader.score(prompts, shifted).correct.any()


def test_a_verifier_that_fails_is_counted(tokenizer):
    """The verifier of calendar_arithmetic looks its question's kind up in the metadata, and raises without it."""
    task = build_task(TaskConfig(dataset="calendar_arithmetic", train_size=4, held_out_size=2), tokenizer)
    good = task.held_out(1)[0]
    broken = dataclasses.replace(good, metadata={})
    verdict = task.grader.score([good, broken], [good.answer, good.answer])
    assert verdict.reward.tolist() == [1.0, 0.0]
    assert verdict.well_formed.all()
    assert verdict.verifier_errors == 1


def test_what_a_verifier_makes_of_an_answer_is_ended_in_time(tokenizer):
    """countdown's verifier gives an answer to sympy's parser, which evaluates any Python: what calls something never
    gets there, and what does not end is ended."""
    config = TaskConfig(
        dataset="countdown", train_size=4, held_out_size=2, rewards=[{"kind": "verifier", "timeout_s": 6}]
    )
    task = build_task(config, tokenizer)
    prompt = task.held_out(1)[0]
    start = time.monotonic()
    verdict = task.grader.score([prompt] * 3, ["9**9**9**9", "__import__('time').sleep(1000)", prompt.answer])
    task.close()
    assert time.monotonic() - start < 300
    assert verdict.timeouts == {"verifier": 1}
    assert verdict.correct.tolist() == [False, False, True]


def test_a_dataset_that_gives_no_answer_because_many_are_right(tokenizer):
    settings = TaskConfig(dataset="graph_color", train_size=2, held_out_size=0, chat_template=False, reward_workers=1)
    task = build_task(settings, tokenizer, max_prompt_tokens=4096)
    (prompt,) = task.prompts(0, 1)
    assert prompt.answer == ""
    found = prompt.metadata["possible_answer"]
    try:
        rewards = task.grader.score(
            [prompt] * 2, [json.dumps({str(node): colour for node, colour in found.items()}), "{}"]
        )
    finally:
        task.close()
    assert rewards.correct.tolist() == [True, False]
    assert rewards.errors == {"verifier": 0}


def test_score_wants_one_response_per_prompt(task):
    with pytest.raises(ValueError, match="2 prompts but 1 responses"):
        task.grader.score(task.held_out(2), ["1"])


def test_more_held_out_prompts_than_there_are(task):
    with pytest.raises(UserError, match=r"201 held-out prompts.*held_out_size=200"):
        task.held_out(201)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": "chain_sums"}, r"task.dataset='chain_sums'.*did you mean chain_sum\?"),
        ({"dataset": "nothing like it"}, r"not in reasoning-gym; known: .*chain_sum"),
        (
            {"parameters": {"min_term": 2}},
            r"task.parameters.min_term is not a parameter of chain_sum; did you mean min_t",
        ),
        ({"parameters": {"min_terms": 9, "max_terms": 2}}, r"refused by chain_sum: max_terms must be >= min_terms"),
        ({"parameters": {"min_terms": "two"}}, r"task.parameters are refused by chain_sum"),
        ({"prompt": "{metadata[expresion]}"}, r"task.prompt=.*expresion.*expression"),
    ],
)
def test_bad_settings_name_the_key_and_the_nearest_right_one(changes, message, tokenizer):
    with pytest.raises(UserError, match=message):
        build_task(TaskConfig(**changes), tokenizer)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"answer_pattern": "("}, "not a regular expression"),
        ({"answer_pattern": r"\d+"}, r"needs a group \(\?P<answer>"),
        ({"parameters": {"seed": 3}}, "'seed' is not a parameter of the dataset here"),
        ({"kind": "math"}, "reasoning-gym"),
        ({"prompt": "{0} {question}"}, r"\{0\} is neither \{question\} nor .* write \{\{ and \}\} for braces"),
        ({"prompt": "{question} in \\boxed{}"}, r"\{\} is neither \{question\} nor"),
        ({"prompt": "{question} in \\boxed{"}, r"not a format string .* write \{\{ and \}\} for braces"),
        ({"prompt": "Think."}, "every prompt would be the same"),
        ({"prompt": "Think in {{braces}}."}, "every prompt would be the same"),
        ({"train_sizes": 3}, "Extra inputs"),
    ],
)
def test_config_refuses(changes, message):
    with pytest.raises(ValidationError, match=message):
        TaskConfig(**changes)


def test_a_tokenizer_without_chat_template(sums, tokenizer):
    bare = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(UserError, match=re.escape("set task.chat_template=false")):
        build_task(sums, bare)
