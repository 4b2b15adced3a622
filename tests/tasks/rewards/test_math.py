"""Verdicts on the kinds of answers that math-verify publishes as corner cases (its tests/test_all.py and README)."""

from __future__ import annotations

import gc

import pytest

from megatron_dppo.tasks.rewards.math import MathJudge
from megatron_dppo.tasks.rewards.verdict import Answered

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


def judge(reference: str, answer: str | None, **settings):
    item = Answered(question="?", reference=reference, response=answer or "", answer=answer)
    return MathJudge(**settings)(item)


def test_there_are_fifty_pairs():
    assert len(set(PAIRS)) == len(PAIRS) >= 50


@pytest.mark.parametrize(("reference", "answer", "right"), PAIRS)
def test_verdicts(reference, answer, right):
    verdict = judge(reference, answer)
    assert verdict.error == ""
    assert verdict.score == float(right)


def test_what_is_no_answer_is_malformed():
    assert not judge("5", None).well_formed
    assert not judge("5", "I do not know").well_formed
    assert judge("5", "6").well_formed


def test_boxes_only():
    assert judge("5", "the 5 of us").score == 1
    assert judge("5", "the 5 of us", boxed_only=True).score == 0
    assert judge("5", "the \\boxed{5} of us", boxed_only=True).score == 1


def test_precision():
    assert judge("0.3333", "1/3", precision=3).score == 1
    assert judge("0.3333", "1/3", precision=6).score == 0


def test_a_reference_that_is_no_mathematics_is_an_error():
    verdict = judge("", "5")
    assert verdict.score == 0
    assert "is no mathematics" in verdict.error


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
    verdict = judge("5", "$\\sum_{k=1}^{1000000} \\log(k)^{\\sin(k)}$", timeout_s=1)
    assert verdict.score == 0
    assert verdict.timed_out
