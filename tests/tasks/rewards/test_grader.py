"""Several rewards at once: weights, names, shaping, and functions that misbehave in every way."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from pydantic import ValidationError

from megatron_dppo.errors import UserError
from megatron_dppo.tasks.config import TaskConfig
from megatron_dppo.tasks.rewards.config import (
    ExactMatchReward,
    FormatReward,
    MathVerifyReward,
    OverlongReward,
    PythonReward,
    VerifierReward,
)
from megatron_dppo.tasks.rewards.grader import Grader, Judged, _Part, build_grader
from megatron_dppo.tasks.task import Prompt
from megatron_dppo.trainer.rollouts import _part_metrics

HERE = "tests.tasks.rewards.functions"


def prompt(answer: str = "14", *, index: int = 0, **metadata) -> Prompt:
    return Prompt(
        index=index, prompt_ids=np.zeros(1, np.int32), text="", question="7 + 7", answer=answer, metadata=metadata
    )


DEFAULT_PATTERN = TaskConfig.model_fields["answer_pattern"].default


def grader(*configs, pattern: str = DEFAULT_PATTERN, workers: int = 2, memory_mib: int = 8192) -> Grader:
    task = TaskConfig(rewards=configs, answer_pattern=pattern, reward_workers=workers, reward_memory_mib=memory_mib)
    return build_grader(task, max_response_tokens=100)


@pytest.fixture(scope="module")
def picky():
    made = grader(PythonReward(path=f"{HERE}:picky", timeout_s=3.0, name="picky"))
    yield made
    made.close()


def test_weighted_sum_and_parts():
    made = grader(
        MathVerifyReward(),
        ExactMatchReward(weight=0.5),
        FormatReward(pattern=r"<think>.*</think>.*", weight=0.25, name="thinks"),
        OverlongReward(buffer_tokens=40),
        PythonReward(path=f"{HERE}:length", weight=0.1, name="length"),
        workers=1,
    )
    responses = ["14", "\\boxed{14}", "<think>\nhm</think> 15", "15"]
    try:
        rewards = made.score([prompt()] * 4, responses, lengths=[60, 80, 100, 400])
    finally:
        made.close()
    np.testing.assert_array_equal(rewards.parts["math-verify"], [1, 1, 0, 0])
    np.testing.assert_array_equal(rewards.parts["exact-match"], [1, 0, 0, 0])
    np.testing.assert_array_equal(rewards.parts["thinks"], [0, 0, 1, 0])
    np.testing.assert_array_equal(rewards.parts["overlong"], [0, -0.5, -1, -1])
    np.testing.assert_allclose(rewards.parts["length"], [len(r) / 10 for r in responses], rtol=1e-6)
    parts = rewards.parts
    expected = (
        parts["math-verify"]
        + 0.5 * parts["exact-match"]
        + 0.25 * parts["thinks"]
        + parts["overlong"]
        + 0.1 * parts["length"]
    )
    np.testing.assert_allclose(rewards.reward, expected, rtol=1e-6)
    assert rewards.correct.tolist() == [True, True, False, False]  # by the first reward
    assert rewards.reward.dtype == np.float32


def test_rewards_that_are_for_some_questions():
    """A part is what its own questions earn; the first that is for a question decides what is correct."""
    made = grader(
        OverlongReward(buffer_tokens=40, when={"length": ["short"]}),
        ExactMatchReward(when={"source": ["sums", 3], "extra.level": "1"}),
        FormatReward(pattern="code.*", weight=2.0, when={"source": "code"}),
        FormatReward(pattern=".*1.*", weight=0.5, name="one"),
    )
    sums, third, code = (
        prompt(source="sums", extra={"level": 1}),
        prompt(source=3, extra={"level": "1"}),
        prompt(source="code"),
    )
    short = prompt(source="code", length="short")
    rewards = made.score([sums, sums, third, code, code], ["14", "15", "14", "code 1", "14"], lengths=[1, 1, 1, 1, 1])
    np.testing.assert_array_equal(rewards.parts["exact-match"], np.float32([1, 0, 1, np.nan, np.nan]))
    np.testing.assert_array_equal(rewards.parts["format"], np.float32([np.nan, np.nan, np.nan, 1, 0]))
    np.testing.assert_array_equal(rewards.parts["one"], np.float32([1, 1, 1, 1, 1]))
    assert np.isnan(rewards.parts["overlong"]).all()
    assert rewards.reward.tolist() == [1.5, 0.5, 1.5, 2.5, 0.5]
    assert rewards.correct.tolist() == [True, False, True, True, False]
    assert rewards.well_formed.tolist() == [True, True, True, True, False]
    assert _part_metrics(rewards)["reward/part/exact-match"] == pytest.approx(2 / 3)
    assert "reward/part/overlong" not in _part_metrics(rewards)
    made.check([sums, third, code])
    with pytest.raises(
        UserError, match=r"none decides .* '7 \+ 7' \(extra.level=None, length='short', source='code'\)"
    ):
        made.check([sums, short])
    only = grader(ExactMatchReward(when={"source": "sums"}))
    with pytest.raises(UserError, match=r"none decides .* \(source='code'\); name its value in the `when`"):
        only.check([code])


def test_a_question_that_is_at_fault_never_stops_a_run():
    """Asked alone, as a window or the last round of a dynamic sampling asks; again and again; or the only one of its
    kind in a step. Two stop a run before any was scored, eight in a row later."""
    made = grader(ExactMatchReward(), PythonReward(path=f"{HERE}:picky", name="picky", when={"source": "code"}))
    sums, code = prompt(source="sums"), [prompt(source="code", index=n, worth=1) for n in range(1, 9)]
    try:
        assert made.score([sums], ["raise"]).errors["picky"] == 0
        for _ in range(3):
            assert made.score([code[0]] * 40, ["raise"] * 40).errors["picky"] == 40
        assert made.score([sums, code[0]], ["14", "raise"]).errors["picky"] == 1
        assert made.doubtful == {1}
        with pytest.raises(UserError, match=r"the reward picky failed on all 122 responses to 2 questions: .*KeyError"):
            made.score([code[1]], ["raise"])
        assert made.score([code[0], code[1]], ["raise", "14"]).errors["picky"] == 1
        assert not made.doubtful
        for one in code[:7]:
            made.score([sums, one, one], ["14", "raise", "nan"])
        with pytest.raises(UserError, match=r"the reward picky failed on all 15 responses to 8 questions: .*nan"):
            made.score(code[7:], ["nan"])
    finally:
        made.close()


def test_overlong_is_eq_13_of_dapo():
    """L = 16384 and c = 4096, as DAPO has it: free up to 12288, then a line to -1."""
    rewards = [FormatReward(pattern=".*"), OverlongReward(buffer_tokens=4096)]
    made = build_grader(TaskConfig(rewards=rewards, answer_pattern="(?P<answer>.*)"), max_response_tokens=16384)
    lengths = [1, 12288, 12289, 14336, 16384, 20000]
    rewards = made.score([prompt()] * 6, [""] * 6, lengths=lengths)
    np.testing.assert_allclose(rewards.parts["overlong"], [0, 0, -1 / 4096, -0.5, -1, -1])
    with pytest.raises(ValueError, match="needs the lengths"):
        made.score([prompt()], [""])


def test_exact_match():
    made = grader(ExactMatchReward(ignore_case=True), pattern=r".*Answer: (?P<answer>.*)")
    rewards = made.score([prompt("New  York")] * 3, ["Answer: new\nyork", "Answer: York", "New York"])
    assert rewards.correct.tolist() == [True, False, False]
    assert rewards.well_formed.tolist() == [True, True, False]
    strict = grader(ExactMatchReward())
    assert strict.score([prompt("a")] * 2, ["a", "A"]).correct.tolist() == [True, False]


def test_a_function_from_a_file_and_one_that_returns_numpy(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def worth(*, question, **_):\n    return len(question)\n")
    ours = [PythonReward(path=f"{HERE}:numpy_{kind}", name=kind) for kind in ("score", "verdict")]
    made = grader(*ours, PythonReward(path=f"{file}:worth"), workers=1)
    try:
        rewards = made.score([prompt()] * 2, ["14", "15"])
    finally:
        made.close()
    np.testing.assert_array_equal(rewards.parts["score"], [1, 0])
    np.testing.assert_array_equal(rewards.parts["verdict"], [1, 0])
    np.testing.assert_array_equal(rewards.parts["python"], [5, 5])


def test_a_function_is_given_lengths_where_it_takes_them(tmp_path):
    """By their names, through a decorator too; one that does not is called as ever, whatever it hands its `**` on to,
    and whether or not it says what it takes."""
    file = tmp_path / "mine.py"
    file.write_text(
        "def long(*, tokens, truncated, question, reference, response, answer, metadata):\n"
        "    return -1.0 if truncated else tokens / 10\n"
        "def plain(question, reference, response, answer, metadata): return 7\n"
        "def hands_on(**given): return plain(**given)\n"
        "import functools\n"
        "def decorated(function):\n"
        "    @functools.wraps(function)\n"
        "    def wrapper(*args, **given): return function(*args, **given) + 1\n"
        "    return wrapper\n"
        "long_too, plain_too = decorated(long), decorated(plain)\n"
        "def adapted(function):\n"
        "    @functools.wraps(function)\n"
        "    def wrapper(*, question, reference, response, answer, metadata): return function(response)\n"
        "    return wrapper\n"
        "@adapted\n"
        "def other(response, tokens=3): return tokens\n"
        "class Unsaid:\n"
        "    __signature__ = 'none'\n"
        "    def __call__(self, **given): return len(given)\n"
        "unsaid = Unsaid()\n"
    )
    worth = {"long": [0.3, -1], "plain": [7, 7], "hands_on": [7, 7], "long_too": [1.3, 0], "plain_too": [8, 8]}
    worth |= {"other": [3, 3], "unsaid": [5, 5]}
    made = grader(*(PythonReward(path=f"{file}:{name}", name=name) for name in worth), workers=1)
    try:
        rewards = made.score([prompt()] * 2, ["14", "15"], lengths=[3, 8], finish_reasons=["stop", "length"])
    finally:
        made.close()
    assert rewards.verifier_errors == 0
    for name, expected in worth.items():
        np.testing.assert_allclose(rewards.parts[name], expected, err_msg=name)


def test_what_a_function_cannot_score_is_counted_and_stalls_nobody(picky, caplog):
    responses = ["raise", "hang", "spin", "nan", "crash", "eat"] + ["fine"] * 20
    start = time.monotonic()
    rewards = picky.score([prompt(worth=2.5)] * len(responses), responses)
    assert time.monotonic() - start < 300
    assert rewards.parts["picky"].tolist() == [0.0] * 6 + [2.5] * 20
    assert rewards.errors == {"picky": 6}
    assert rewards.timeouts == {"picky": 2}
    assert rewards.verifier_errors == 6
    assert "reward picky could not score 6 of 26" in caplog.text
    assert "raised KeyError: 'no such thing'" in caplog.text


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("raise", "raised KeyError: 'no such thing'"),
        ("nan", "returned nan"),
        ("crash", "its worker process ended with status 3"),
        ("hang", "killed after 3 s"),
        ("eat", "MemoryError"),
        ("fine", r"the score 300 is outside of its bounds \[-100, 100\]; a python reward may set bounds"),
    ],
)
def test_a_function_that_fails_on_every_response_stops_the_run(picky, response, reason):
    made = replace(picky, parts=[_Part(part.config, part.reward) for part in picky.parts])  # nothing was scored yet
    with pytest.raises(UserError, match=f"the reward picky failed on all 2 responses to 2 questions: .*{reason}"):
        made.score([prompt(worth=300, index=n) for n in range(2)], [response] * 2)


def test_responses_that_are_judged_apart_are_scored_together(picky):
    """A function may fail on all responses of one part."""
    responses = ["raise", "nan", "raise", "14", "15", "14"]
    prompts = [prompt(worth=n, index=n) for n in range(6)]
    whole = picky.score(prompts, responses)
    parts = [picky.judge(prompts[rows], responses[rows]) for rows in (slice(0, 3), slice(3, 4), slice(4, 6))]
    apart = picky.rewards(Judged.concatenate(parts))
    for name in ("reward", "correct", "well_formed"):
        np.testing.assert_array_equal(getattr(apart, name), getattr(whole, name), err_msg=name)
    assert (apart.errors, apart.timeouts, apart.verifier_errors) == (whole.errors, whole.timeouts, 3)


def test_a_function_that_returns_text_is_named():
    made = grader(PythonReward(path=f"{HERE}:text"), workers=1)
    with pytest.raises(UserError, match=r"functions:text returned 'good' \(str\).*must return a number"):
        made.score([prompt(), prompt(index=1)], ["x"] * 2)
    made.close()


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        (f"{HERE}:absent", "has no callable absent"),
        (f"{HERE}:not_callable", "has no callable not_callable"),
        ("no.such.module:f", "cannot be imported: ModuleNotFoundError"),
        ("no/such/file.py:f", "cannot be imported: FileNotFoundError"),
    ],
)
def test_a_function_that_is_not_there(path, reason):
    made = grader(PythonReward(path=path), workers=1)
    before = set(psutil.Process().children())
    for ask in (made.prepare, lambda: made.score([prompt()], ["x"])):
        with pytest.raises(UserError, match=f"the reward .*{reason}"):
            ask()
    assert set(psutil.Process().children()) <= before


def test_the_worker_that_imported_a_function_is_kept():
    made = grader(MathVerifyReward(), PythonReward(path=f"{HERE}:length"), workers=1)
    before = set(psutil.Process().children())
    made.prepare()
    made.prepare()
    started = set(psutil.Process().children()) - before
    assert len(started) == 1
    made.score([prompt()], ["a"])
    assert set(psutil.Process().children()) - before == started
    made.close()
    assert not [child for child in started if child.is_running()]


def test_workers_end_with_the_grader():
    made = grader(PythonReward(path=f"{HERE}:length"))
    before = {child.pid for child in psutil.Process().children()}
    made.score([prompt()] * 4, ["a"] * 4)
    started = [child for child in psutil.Process().children() if child.pid not in before]
    assert len(started) == 2
    made.close()
    assert not [child for child in started if child.is_running()]


def test_workers_outlive_the_thread_that_asked_first():
    made = grader(PythonReward(path=f"{HERE}:length"))
    before = {child.pid for child in psutil.Process().children()}
    thread = threading.Thread(target=lambda: made.score([prompt()] * 4, ["a"] * 4))
    thread.start()
    thread.join()
    started = [child for child in psutil.Process().children() if child.pid not in before]
    assert len(started) == 2
    _, alive = psutil.wait_procs(started, timeout=1.0)
    assert len(alive) == 2
    assert made.score([prompt()] * 4, ["a"] * 4).verifier_errors == 0
    made.close()


def test_calls_from_two_threads_get_their_own_verdicts():
    """Steps that are sampled ahead and evaluations are scored by the same workers."""
    made = grader(PythonReward(path=f"{HERE}:length"))
    with ThreadPoolExecutor(2) as threads:
        lengths = [range(1, 61), range(101, 161)]
        found = [threads.submit(made.score, [prompt()] * 60, ["x" * n for n in of_call]) for of_call in lengths]
        for of_call, rewards in zip(lengths, found, strict=True):
            np.testing.assert_allclose(rewards.result().reward, np.array(of_call) / 10, rtol=1e-6)
    made.close()


def test_settings_that_contradict():
    with pytest.raises(UserError, match="two are named alike"):
        grader(FormatReward(pattern="a"), FormatReward(pattern="b"))
    with pytest.raises(UserError, match="overlong cannot, put another first"):
        grader(OverlongReward(buffer_tokens=10))
    with pytest.raises(UserError, match="buffer_tokens=100 must be below the 100 tokens"):
        grader(FormatReward(pattern="a"), OverlongReward(buffer_tokens=100))
    with pytest.raises(UserError, match="no verifier of its own"):
        grader(VerifierReward())


def test_the_functions_file_is_where_the_tests_say():
    assert Path(*HERE.split(".")).with_suffix(".py").exists()


def found(response: str, reason: str = "stop", *, pattern: str = DEFAULT_PATTERN, asked: str = "") -> str | None:
    """The answer that is handed to rewards."""
    put = Prompt(index=0, prompt_ids=np.zeros(1, np.int32), text=asked, question="?", answer="")
    return grader(ExactMatchReward(), pattern=pattern)._answers([put], [response], [reason == "length"])[0][0]


@pytest.mark.parametrize(
    ("response", "answer"),
    [("14", "14"), (" \n7 + 7\n= 14 \n\n", "7 + 7\n= 14"), ("x", "x"), (" \n\t", None), ("", None), ("a b ", "a b")],
)
def test_the_default_pattern_takes_what_is_not_blank_around(response: str, answer: str | None):
    assert found(response) == answer


def test_the_default_pattern_is_linear_in_a_run_of_blanks():
    """What a degenerate policy writes: 200,000 blanks amid an answer. Trying every end of the run for itself would take
    minutes, on the controller."""
    response = "x" + " " * 200_000 + "14"
    start = time.monotonic()
    assert found(response) == response
    assert time.monotonic() - start < 60


@pytest.mark.parametrize(
    ("response", "reason", "asked", "answer"),
    [
        ("Answer: 12", "stop", "", "12"),
        ("Answer: 12", "length", "", None),  # cut off: what came may be any part of an answer
        ("<think>Answer: 12", "stop", "", None),
        ("Answer: 12", "stop", "<|assistant|>\n<think>\n", None),  # the chat template opened the thinking
        ("Hm.</think>Answer: 12", "stop", "<|assistant|>\n<think>\n", "12"),
        ("Answer: 12", "stop", "<think>\n\n</think>\n\n", "12"),
        ("<think>Answer: 13</think>Answer: 12", "stop", "", "12"),
        ("<think>Answer: 12</think>I do not know", "stop", "", None),
        ("<think>a</think>Answer: 12 <think>or", "stop", "", None),
    ],
)
def test_an_answer_is_given_after_the_thinking_and_before_the_end(response, reason, asked, answer):
    assert found(response, reason, pattern=r".*Answer: (?P<answer>[^\n<]+).*", asked=asked) == answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("Thus 34.\n\nAnswer: 34", "34"),
        ("Thus 34.\n\nAnswer:\n34", "34"),
        ("**Answer:**\n34\n\nDone.", "34"),
        ("Answer: 1\nanswer : 2\n", "2"),
        ("Thus 34.", None),
    ],
)
def test_the_pattern_of_the_documentation(response, answer):
    text = Path("docs/data.md").read_text(encoding="utf-8")
    pattern = text.split("answer_pattern: '")[1].split("'")[0]
    assert found(response, pattern=pattern) == answer


BACKTRACKING = r"(?:a|aa)*</answer>"
NEVER_DECIDED = "a" * 60 + "</answer>!"


def test_a_nested_repeat_that_a_library_can_decide_takes_no_time():
    made = grader(FormatReward(pattern=r"(?:\s*\w+\s*)*</answer>"))
    rewards = made.score([prompt()] * 2, ["a" * 40, "a b </answer>"])
    assert (rewards.correct.tolist(), rewards.verifier_errors) == ([False, True], 0)


def test_a_pattern_that_backtracks_is_ended_and_counted(caplog, monkeypatch):
    monkeypatch.setattr("megatron_dppo.tasks.rewards.patterns.MATCH_TIMEOUT_S", 0.1)
    made = grader(FormatReward(pattern=BACKTRACKING), ExactMatchReward(), pattern=f"(?P<answer>{BACKTRACKING})")
    rewards = made.score([prompt("a</answer>")] * 3, [NEVER_DECIDED, "a</answer>", NEVER_DECIDED])
    assert rewards.correct.tolist() == [False, True, False]
    assert rewards.parts["exact-match"].tolist() == [0, 1, 0]
    assert rewards.errors == {"format": 2, "exact-match": 0}
    assert rewards.timeouts == {"format": 2, "exact-match": 0}
    assert rewards.verifier_errors == 4
    assert "task.answer_pattern took more than 0.1 s to match, on 2 of 3 responses" in caplog.text


def test_a_pattern_that_backtracks_on_everything_stops_the_run(monkeypatch):
    monkeypatch.setattr("megatron_dppo.tasks.rewards.patterns.MATCH_TIMEOUT_S", 0.1)
    monkeypatch.setattr("megatron_dppo.tasks.rewards.patterns._CALL_TIMEOUT_S", 0.3)
    made = grader(ExactMatchReward(), pattern=f"(?P<answer>{BACKTRACKING})")
    with pytest.raises(
        UserError, match=r"^task.answer_pattern='.*' takes too long: .* on each of \d+ responses; write"
    ):
        made.score([prompt()] * 500, [NEVER_DECIDED] * 500)


def test_a_reward_that_float32_cannot_hold_is_an_error():
    made = grader(PythonReward(path=f"{HERE}:huge"), FormatReward(pattern=".*"), workers=1)
    try:
        rewards = made.score([prompt()] * 2, ["1e39", "-3"])
    finally:
        made.close()
    assert rewards.reward.tolist() == [1.0, -2.0]
    assert rewards.errors["python"] == 1
    with pytest.raises(ValidationError, match="less than or equal to 1000000"):
        FormatReward(pattern="a", weight=1e39)


@pytest.mark.parametrize("config", [MathVerifyReward(), ExactMatchReward()], ids=["math-verify", "exact-match"])
def test_any_accepted_answer_is_right(config):
    made = grader(config, workers=1)
    put = Prompt(
        index=0, prompt_ids=np.zeros(1, np.int32), text="", question="?", answer="red", also_accepted=("crimson", "7")
    )
    try:
        assert made.score([put] * 4, ["red", "7", "crimson", "blue"]).correct.tolist() == [True, True, True, False]
    finally:
        made.close()
