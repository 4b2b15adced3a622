"""Questions from a file as a task: order, held-out set, prompts, length filter, verdicts by the real math-verify."""

from __future__ import annotations

import copy
import datetime
import json

import numpy as np
import pytest
from pydantic import ValidationError

from megatron_dppo.errors import UserError
from megatron_dppo.tasks.build import build_task
from megatron_dppo.tasks.config import TaskConfig
from megatron_dppo.trainer.task_suite import judge_responses

SUMS = [{"problem": f"{i} + {i}", "answer": str(2 * i)} for i in range(30)]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "sums.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in SUMS))
    return file


def config(path, **settings) -> TaskConfig:
    return TaskConfig(kind="data", data={"path": str(path)}, **{"held_out_size": 4, **settings})


def test_held_out_and_training_questions_are_the_whole_file_and_apart(path, tokenizer):
    task = build_task(config(path), tokenizer)
    train = [p.question for p in task.prompts(0, task.epoch_size)]
    held_out = [p.question for p in task.held_out(4)]
    assert sorted(train + held_out) == sorted(row["problem"] for row in SUMS)


def test_order_depends_on_seed_and_epoch_and_goes_on_at_the_exact_prompt(path, tokenizer):
    task, again = build_task(config(path), tokenizer), build_task(config(path), tokenizer)
    stream = [p.index for p in task.prompts(0, 80)]
    # A run that stopped after 37 prompts asks another process for number 37, in the middle of the second epoch.
    assert [p.index for p in again.prompts(37, 43)] == stream[37:]
    assert sorted(stream[:26]) == sorted(stream[26:52])
    assert stream[:26] != stream[26:52]
    other = build_task(config(path, seed=1), tokenizer)
    assert [p.index for p in other.prompts(0, 26)] != stream[:26]
    assert other.fingerprint != task.fingerprint == again.fingerprint


def test_questions_come_as_often_as_their_field_says(tmp_path, tokenizer):
    rows = [{"problem": f"{i}", "answer": "1", "of": {"source": "code" if i % 3 == 0 else "sums"}} for i in range(12)]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain = config(tmp_path / "mixed.jsonl", held_out_size=0)
    task = build_task(plain.model_copy(update={"repeat": {"of.source": {"code": 3}}}), tokenizer)
    assert task.epoch_size == 4 * 3 + 8
    for epoch in range(2):
        asked = [p.question for p in task.prompts(epoch * task.epoch_size, task.epoch_size)]
        assert sorted(asked) == sorted([f"{i}" for i in range(12) for _ in range(1 if i % 3 else 3)])
    assert asked != sorted(asked)
    assert task.report[-2:] == ["  4 with of.source=code come 3 times as often (task.repeat)", "  20 in an epoch"]
    assert task.fingerprint != build_task(plain, tokenizer).fingerprint
    for repeat, message in (
        (
            {"of.source": {"coed": 3}},
            "task.repeat.of.source.coed: no training question has it; of.source is: code, sums",
        ),
        ({"source": {"code": 3}}, "task.repeat.source.code: no training question has it; source is: no row has it"),
    ):
        with pytest.raises(UserError, match=message):
            build_task(plain.model_copy(update={"repeat": repeat}), tokenizer)


def test_a_question_that_no_reward_is_for_is_refused_when_it_is_read(tmp_path, tokenizer):
    rows = [{"problem": "1", "answer": "\\", "source": "words"}, {"problem": "2", "answer": "2", "source": "sums"}]
    (tmp_path / "two.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sums = {"kind": "math-verify", "when": {"source": "sums"}}
    with pytest.raises(UserError, match=r"none decides what is a correct answer to '1' \(source='words'\)"):
        build_task(config(tmp_path / "two.jsonl", held_out_size=0, rewards=[sums]), tokenizer)
    words = {"kind": "exact-match", "when": {"source": "words"}}
    bonus = {"kind": "format", "pattern": "a", "name": "bonus", "when": {"source": ["wrods", 3]}}
    task = build_task(config(tmp_path / "two.jsonl", held_out_size=0, rewards=[sums, words, bonus]), tokenizer)
    assert task.report[-1] == (
        "  the reward bonus is for none of the training questions: {'source': ('wrods', '3')} (task.rewards)"
    )
    assert "no answer can meet" not in "\n".join(task.report)  # the first is not compared by mathematics
    task.close()


def test_the_length_filter_counts(path, tokenizer):
    longest = build_task(config(path), tokenizer).prompts(0, 1)[0].prompt_ids.size
    task = build_task(config(path, held_out_size=0), tokenizer, max_prompt_tokens=7)
    assert task.epoch_size == 10  # "i + i" with one digit is 5 tokens and the template's 2
    text = "\n".join(task.report)
    assert "10 questions of 30 rows" in text
    assert "left out: 20 too long" in text
    assert "sums.jsonl, line 11 (9 tokens)" in text
    assert longest in (7, 9)
    with pytest.raises(UserError, match=r"all 30 prompts are longer than rollout.max_prompt_tokens=3"):
        build_task(config(path), tokenizer, max_prompt_tokens=3)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("{problem} {metadata[hint]}", "neither"),
        ("{question} {metadata[hint]}", r"hints.jsonl, line 2: task.prompt=.* \(ValueError: what it shows is null\)"),
        ("{metadata[blank]}", r"hints.jsonl, line 2: task.prompt='{metadata\[blank\]}' gives a blank message"),
        ("{metadata[hint][text]}", r"hints.jsonl, line 1: task.prompt=.* \(TypeError: string indices must be integers"),
    ],
)
def test_a_prompt_that_a_row_does_not_fill(tmp_path, tokenizer, prompt, message):
    rows = [{"problem": "1", "answer": "1", "hint": h, "blank": b} for h, b in (("h", "b"), (None, " "))]
    (tmp_path / "hints.jsonl").write_text(f"{json.dumps(rows[0])}\n" + json.dumps(rows[1] | {"problem": "2"}) + "\n")
    with pytest.raises((UserError, ValidationError), match=message):
        build_task(config(tmp_path / "hints.jsonl", held_out_size=0, prompt=prompt, chat_template=False), tokenizer)


def test_a_template_with_a_clock_shows_the_date_of_the_run(path, tokenizer):
    clocked = copy.deepcopy(tokenizer)
    clocked.chat_template = "{{ strftime_now('%d %b %Y') }}|" + tokenizer.chat_template
    task = build_task(config(path, date="2024-02-29"), clocked)
    assert task.prompts(0, 1)[0].text.startswith("29 Feb 2024|")
    assert build_task(config(path, date="2024-02-29"), clocked).fingerprint == task.fingerprint
    assert build_task(config(path, date="2024-03-01"), clocked).fingerprint != task.fingerprint
    today = {datetime.date.today(), (datetime.datetime.now() - datetime.timedelta(minutes=10)).date()}
    assert build_task(config(path), clocked).prompts(0, 1)[0].text[:11] in {f"{day:%d %b %Y}" for day in today}


def test_the_fingerprint_knows_the_reference_answers(path, tokenizer, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps(row | {"answer": row["answer"] + "0"}) + "\n" for row in SUMS))
    made = [build_task(config(file), tokenizer) for file in (path, other)]
    assert [p.text for p in made[0].prompts(0, 26)] == [p.text for p in made[1].prompts(0, 26)]
    assert made[0].fingerprint != made[1].fingerprint


def test_prompt_of_messages_by_chat_template_and_raw(tmp_path, tokenizer):
    messages = [
        {"role": "system", "content": "Short."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "1 + 1"},
    ]
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"prompt": messages, "reward_model": {"ground_truth": "2"}}) + "\n")
    settings = {"held_out_size": 0, "prompt": "{question} = ({metadata[reward_model][ground_truth]})?"}

    def text(**more) -> str:
        prompt = build_task(config(file, **settings, **more), tokenizer).prompts(0, 1)[0]
        assert tokenizer.decode(prompt.prompt_ids) == prompt.text
        return prompt.text

    assert text() == "<|system|>Short.<|user|>Hi<|assistant|>Yes?<|end|><|user|>1 + 1 = (2)?<|assistant|>"
    assert text(system_prompt="Add.").startswith("<|system|>Add.<|user|>Hi")
    assert text(chat_template=False) == "Short.\nHi\nYes?\n1 + 1 = (2)?"


def test_math_verify_scores_by_default(path, tokenizer):
    task = build_task(config(path, reward_workers=1), tokenizer)
    prompt = next(p for p in task.prompts(0, 26) if p.question == "7 + 7")
    try:
        verdict = task.grader.score([prompt] * 4, ["\\boxed{14}", "so it is $28/2$", "15", "no idea"])
    finally:
        task.close()
    assert verdict.correct.tolist() == [True, True, False, False]
    assert verdict.well_formed.tolist() == [True, True, True, False]
    np.testing.assert_array_equal(verdict.parts["math-verify"], verdict.reward)
    assert verdict.errors == {"math-verify": 0}


def test_more_questions_wanted_than_there_are(path, tokenizer):
    with pytest.raises(UserError, match=r"want 34 questions, but .*sums.jsonl has 30"):
        build_task(config(path, train_size=30), tokenizer)
    assert build_task(config(path, train_size=10), tokenizer).epoch_size == 10


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "data"}, "task.kind=data and the section task.data go together"),
        ({"data": {"path": "x"}}, "task.kind=data and the section task.data go together"),
        ({"kind": "data", "data": {"path": "x", "layout": "math", "fields": {"question": "q", "answer": "a"}}},
         "set layout or fields, not both"),
        ({"kind": "data", "data": {"path": "x", "fields": {"answer": "a"}}}, "set one of question and messages"),
        ({"kind": "data", "data": {"path": "x", "fields": {"question": "a"}}}, "set answer, or solution"),
        ({"repeat": {"source": {"code": 2}}}, "task.repeat looks at rows of task.data, which is not set"),
        ({"rewards": [{"kind": "exact-match", "when": {"source": []}}]}, "at least 1 item"),
        ({"rewards": [{"kind": "exact-match", "when": {"source": None}}]}, "valid string"),
        ({"rewards": [{"kind": "exact-match", "when": {"source": {"a": "b"}}}]}, "valid string"),
    ],
)  # fmt: skip
def test_config_refuses(settings, message):
    with pytest.raises(ValidationError, match=message):
        TaskConfig(**settings)


def test_the_finish_reason_reaches_the_rewards(path, tokenizer):
    """As the trainer and the evaluation call it: token ids, and why each response ended."""
    task = build_task(config(path, reward_workers=1), tokenizer)
    prompt = next(p for p in task.prompts(0, 26) if p.question == "7 + 7")
    ids = np.asarray(tokenizer.encode("\\boxed{14}", add_special_tokens=False))
    try:
        judged = judge_responses(task.grader, tokenizer, [prompt], 2, [ids, ids], ["stop", "length"])
        rewards = task.grader.rewards(judged)
    finally:
        task.close()
    assert rewards.correct.tolist() == [True, False]
    assert rewards.well_formed.tolist() == [True, False]
