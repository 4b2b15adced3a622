"""Verdicts on the kinds of answers that math-verify publishes as corner cases (its tests/test_all.py and README)."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import numpy as np
import pytest

from megatron_dppo.tasks.config import TaskConfig
from megatron_dppo.tasks.rewards.config import MathVerifyReward
from megatron_dppo.tasks.rewards.grader import build_grader
from megatron_dppo.tasks.rewards.math import MathVerifier, meets_itself
from megatron_dppo.tasks.rewards.verdict import Answered
from megatron_dppo.tasks.task import Prompt

PAIRS = [
    # numbers: signs, separators, decimals, currency, units
    ("-5", "-5", True),
    ("7425000", "7,425,000", True),
    ("1000", "1 000", True),
    ("1000", "1000.0", True),
    ("0.4", ".4", True),
    ("1000.99", "$1,000.99", True),
    ("1000.99", "so the number is 10 which is 1,000.99m²", True),
    ("2", "AZYUK2A", False),
    # fractions
    ("10/9", "\\frac{10}{9}", True),
    ("-10/9", "-\\frac{10}{9}", True),
    ("1/3", "$\\frac13 $", True),
    ("\\frac{1}{3}", "$\\cfrac{1}{3}$", True),
    ("\\frac{1}{3}", "$\\dfrac{1}{3}$", True),
    ("1/3", "$\\left( \\frac{1}{3} \\right)$", True),
    ("1/3", "$\\frac{1}{3} \\text{meters}$", True),
    ("$\\frac{1}{12}$", "$0.0833333333333333$", True),
    ("\\frac{1}{2}", "\\frac{1}{3}", False),
    # intervals, sets, tuples
    ("$[0,1)$", "$[0,1)$", True),
    ("$[0,9)$", "$[0,1)$", False),
    ("$(0,9)$", "$[0,9)$", False),
    ("$[-1, -\\frac{1}{2}) \\cup (0, 1)$", "The solution set is $\\boxed{[-1, -\\tfrac12) \\cup (0, 1)}.$", True),
    ("\\{1, 2, 3\\}", "$\\{3, 2, 1\\}$", True),
    ("\\{1, 2, 3\\}", "$\\{1, 2, 4\\}$", False),
    ("$\\{1\\pm\\sqrt{5},-2\\}$", "so the answer is $\\boxed{\\{1\\pm\\sqrt{5},-2\\}}.$", True),
    ("$(6,31,-1)$", "we find $(p,q,r) = \\boxed{(6,31,-1)}.$", True),
    ("$(1,\\frac{9}{2})$", "$(1,4.5)$", True),
    ("$-2,1$", "the only integer roots are $\\boxed{-2,1}.$", True),
    # units, percent, degrees
    ("$28\\%$", "28 percent", True),
    ("$28\\%$", "$\\boxed{28}$ pct", True),
    ("$0.28$", "28", False),
    ("$15\\mbox{ cm}^2$", "$$\\frac{1}{2}\\times 3 \\times 10 = \\boxed{15\\mbox{ cm}^2}.$$", True),
    (
        "$90^\\circ$",
        "\\begin{align*} \\angle BAC &= 50^\\circ+40^\\circ \\\\ &= \\boxed{90^\\circ}. \\end{align*}",
        True,
    ),
    ("$125$ miles", "The distance is $\\boxed{125\\textnormal{ miles}}.$", True),
    # LaTeX around and inside
    ("$9$", "Answer \\[ 9 \\]", True),
    ("$9$", "Answer \\( 9 \\)", True),
    ("$9$", "Answer $$ \n 9 \n $$", True),
    ("$\\sqrt{3}$", "$\\sqrt3 $", True),
    ("$\\sqrt{2}+\\sqrt{5}$", "The answer is $\\boxed{\\sqrt 2+\\sqrt 5}$", True),
    ("$\\frac{9}{4}\\pi$", "Therefore $\\boxed{\\frac94\\pi}$.", True),
    ("$1 \\pm \\sqrt{19}$", "$x = \\boxed{1 \\pm \\sqrt{19}}.$", True),
    ("$\\text{Evelyn}$", "Therefore, $\\boxed{\\text{Evelyn}}$ is our answer.", True),
    ("$\\text{Evelyn}$", "Therefore, $\\boxed{\\text{Carla}}$ is our answer.", False),
    # unclosed braces and dollars
    ("$28\\%$", "$\\boxed{28 percent}", True),
    ("7", "cut off inside its box: \\boxed{7", False),
    # expressions and relations
    ("$2-2p$", "If $2-x=p$, then $x=2-p$. Thus $x-p=\\boxed{2-2p}$.", True),
    ("$\\frac{x+2}{7}$", "$\\frac{x}{7}+\\frac{2}{7}$", True),
    ("$x < 1$", "$-x > -1$", True),
    ("$x > 5$", "Therefore $x < 5$ is the solution.", False),
    ("$11$", "$x=11$", True),
    ("$1$", "$k=1$", True),
    ("$a^2 + b = 0$", "$0$", False),
    ("$2x+4y-3=0$", "$y=-\\frac{1}{2}x+\\frac{3}{4}$", True),
    # matrices
    (
        "$\\begin{pmatrix}1 & 2 \\\\3 & 4\\end{pmatrix}$",
        "$ \\left[\\begin{array}{cc}1 & 2 \\\\3 & 4\\end{array}\\right] $",
        True,
    ),
    (
        "$\\begin{pmatrix}1 & 2 \\\\ 3 & 4\\end{pmatrix}$",
        "$\\begin{pmatrix}1 & 2 \\\\ 3 & 5\\end{pmatrix}$",
        False,
    ),
    # the last box counts (boxes close together are taken for one answer of several parts)
    ("189", "first \\boxed{3} is wrong. So the answer is\n \\boxed{189}.", True),
    ("204_5", "for a quotient of $\\boxed{204_5}$.", True),
]


def verify(reference: str, answer: str | None, **settings):
    item = Answered(question="?", reference=reference, response=answer or "", answer=answer)
    return MathVerifier(**{"timeout_s": 60, **settings})(item)  # whatever else the machine does


def test_there_are_fifty_pairs():
    assert len(set(PAIRS)) == len(PAIRS) >= 50


@pytest.mark.parametrize(("reference", "answer", "right"), PAIRS)
def test_verdicts(reference, answer, right):
    verdict = verify(reference, answer)
    assert verdict.error == ""
    assert verdict.score == float(right)


def test_what_is_no_answer_is_malformed():
    assert not verify("5", None).well_formed
    assert not verify("5", "I do not know").well_formed
    assert verify("5", "6").well_formed


def test_boxes_only():
    assert verify("5", "the 5 of us").score == 1
    assert verify("5", "the 5 of us", boxed_only=True).score == 0
    assert verify("5", "the \\boxed{5} of us", boxed_only=True).score == 1


@pytest.mark.parametrize(
    ("reference", "answer", "precision", "right"),
    [
        ("0.3333", "1/3", 4, True),
        ("0.3333", "1/3", 6, False),
        ("\\frac{2}{3}", "0.666667", 6, True),  # rounded
        ("\\frac{2}{3}", "0.666666", 6, True),  # cut off
        ("\\frac{2}{3}", "0.666665", 6, False),
        ("\\sqrt{2}", "1.414214", 6, True),
        ("\\sqrt{2}", "1.414", 6, False),
        ("\\pi", "3.14159", 6, True),
        ("\\pi", "3.14160", 6, False),  # neither rounded nor cut off
        ("1234567.8", "1234567.9", 6, False),
        ("2000001", "2000000.5", 6, False),
    ],
)
def test_a_decimal_of_enough_digits_stands_for_what_it_rounds(reference, answer, precision, right):
    assert verify(reference, answer, precision=precision).score == right


def test_a_reference_that_is_empty_is_an_error():
    verdict = verify("", "5")
    assert verdict.score == 0
    assert verdict.error == "the reference answer is empty"


def _pairs() -> dict[str, list[dict]]:
    """By form. The expectations were written from mathematics, before the rules were."""
    forms: dict[str, list[dict]] = {}
    for line in Path(__file__).with_name("pairs.jsonl").read_text(encoding="utf-8").splitlines():
        pair = json.loads(line)
        forms.setdefault(pair["form"], []).append(pair)
    return forms


@pytest.fixture(scope="module")
def whole_grader():
    """As a run has it, but for the processes: what the pool gives its workers is scored here."""
    made = build_grader(TaskConfig(rewards=[MathVerifyReward(timeout_s=60)]), max_response_tokens=100)
    verifiers = made.pool._verifiers
    made.pool.verify = lambda tasks: [verifiers[name].verifier(item) for name, item in tasks]
    return made


@pytest.mark.parametrize("form", _pairs())
def test_every_pair_is_scored_rightly(form, whole_grader, no_gc_callbacks):
    pairs = _pairs()[form]
    prompts = [
        Prompt(index=0, prompt_ids=np.zeros(1, np.int32), text="", question="?", answer=pair["reference"])
        for pair in pairs
    ]
    reasons = [pair.get("finish_reason", "stop") for pair in pairs]
    rewards = whole_grader.score(prompts, [pair["response"] for pair in pairs], None, reasons)
    wrong = [pair for pair, right in zip(pairs, rewards.correct, strict=True) if right != pair["score"]]
    assert wrong == []
    assert rewards.verifier_errors == 0


def test_every_reference_of_the_pairs_meets_itself():
    references = {pair["reference"] for pairs in _pairs().values() for pair in pairs}
    assert [reference for reference in references if not meets_itself(reference)] == []


@pytest.mark.parametrize("reference", ["", "  ", "\\frac{1}{", "\\boxed{", "x}{", "9" * 5000, "\\text{}", "$$"])
def test_references_that_no_answer_can_meet(reference):
    assert not meets_itself(reference)
    assert verify(reference, f"\\boxed{{{reference}}}").score == 0


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("So " + "we add 1 and subtract 1. " * 2000 + "\\boxed{5}", True),
        ("So " + "we add 5 and subtract 5. " * 2000 + "\\boxed{4}", False),
        ("\\boxed{9^{9^{9^{9}}}}", False),
        ("\\boxed{10^{1000000000}}", False),
        ("\\boxed{(10^9)!}", False),
        ("\\boxed{" + "(" * 5000 + "5}", False),
        ("\\boxed{" * 9000, False),
        ("\\boxed{1}" * 9000, False),
        ("\\boxed{" + "{" * 1900 + "}" * 1900 + "}", False),
        ("\\boxed{" + "9" * 20000 + "}", False),
        ("\\boxed{" + "1," * 1999 + "}", False),
        ("\\boxed{" + "\\pm " * 900 + "5}", False),
        ("\\boxed{\\frac{1}{0}}", False),
        ("answer is " * 7000, False),
        ("$" * 60000, False),
    ],
    ids=range(15),
)
@pytest.mark.parametrize("reference", ["5", "x=5", "(5, 6)", "five", "5 cm", "\\in&and \\sqrt\\{)"])
def test_what_a_policy_writes_is_scored_in_time(reference, answer, right, no_gc_callbacks):
    verdict = verify(reference, answer)
    assert verdict.score == (right and reference in ("5", "x=5", "5 cm"))
    assert not verdict.timed_out


@pytest.fixture
def no_gc_callbacks():
    """Hypothesis has the collector call it, which no reward worker knows. What an alarm raises within
    such a call is lost, and with it math-verify's and pytest's own time limit: the test would run for an hour."""
    kept = gc.callbacks[:]
    gc.callbacks.clear()
    yield
    gc.callbacks.extend(kept)


def test_an_answer_that_takes_too_long_is_out_of_time(no_gc_callbacks):
    """Expanding this sum of a million logarithms takes sympy minutes."""
    verdict = verify("5", "$\\sum_{k=1}^{1000000} \\log(k)^{\\sin(k)}$", timeout_s=1)
    assert verdict.score == 0
    assert verdict.timed_out
