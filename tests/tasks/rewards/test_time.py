"""The time of a grader grows like the text: what a degenerate policy repeats holds nobody up."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from megatron_dppo.tasks.rewards.canonical import canonical
from megatron_dppo.tasks.rewards.equality import _label
from megatron_dppo.tasks.rewards.final_answer import final_answer

LENGTHS = (500, 2_000, 8_000, 32_000)

REPEATED = [
    (canonical, "", "{ ", ""),
    (canonical, "{", " ", "}"),
    (canonical, "{", " ", "\\choose"),
    (canonical, "{a", "\\choose ", ""),
    (canonical, "", "{a \\choose ", ""),
    (canonical, "", "{a \\choose b} ", ""),
    (canonical, "]", ",1", ""),
    (canonical, "]", ",1", "x("),
    (canonical, "5 (abc", "a", "!"),
    (canonical, "x (\\approx", " ", "("),
    (canonical, "^", " ", "x"),
    (canonical, "\\log_", " ", "x"),
    (canonical, "", "the ", ""),
    (canonical, "0.", "1", "x..."),
    (canonical, "0.", "12", "..."),
    (canonical, "", "C_a", ""),
    (canonical, "", "^1C_", ""),
    (canonical, "x^{", "\\prime ", "("),
    (canonical, "", "+ ", "c"),
    (_label, "", "abc ", "1"),
    (final_answer, "", "\\", ""),
    (final_answer, "", "\\boxed", ""),
    (final_answer, "", "\\boxed{", ""),
    (final_answer, "", "\\( ab ", ""),
    (final_answer, "", "\\[ ab ", ""),
    (final_answer, "", "<answer>", ""),
    (final_answer, "", "<answer>5</answer>", ""),
    (final_answer, "\\boxed{1}", " ", "x\\boxed{2}"),
    (final_answer, "\\boxed{1}", ",", "x\\boxed{2}"),
    (final_answer, "Answer: 5", " ", "x"),
    (final_answer, "Answer: $x$, a b", "b", "$"),
]


@pytest.mark.parametrize(("read", "head", "unit", "tail"), REPEATED)
def test_four_times_the_text_takes_about_four_times_as_long(
    read: Callable[[str], object], head: str, unit: str, tail: str
) -> None:
    """Not sixteen times: ten, and what a busy machine adds."""
    before = None
    for length in LENGTHS:
        text = head + unit * (length // len(unit)) + tail
        took = min(_seconds(read, text) for _ in range(2))
        assert before is None or took < 10 * before + 0.05, f"{took:.3f} s for {length} characters, {before:.3f} before"
        before = took


def _seconds(read: Callable[[str], object], text: str) -> float:
    start = time.thread_time()
    read(text)
    return time.thread_time() - start
