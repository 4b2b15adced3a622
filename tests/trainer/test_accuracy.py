"""avg@n, pass@k and their spread, against counting and against simulation."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from megatron_dppo.trainer.evaluation import accuracy_metrics, bootstrap_interval, pass_at_k, powers_of_two


@pytest.mark.parametrize("right", range(7))
@pytest.mark.parametrize("k", range(1, 7))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(right, k):
    answers = np.arange(6) < right
    subsets = list(combinations(answers, k))
    expected = sum(any(subset) for subset in subsets) / len(subsets)
    np.testing.assert_allclose(pass_at_k(answers[None], k), [expected], atol=1e-12)


def test_pass_at_k_is_unbiased():
    """Prompts of accuracy p: the mean estimate from n = 4 answers is 1 - (1 - p)^2; the plug-in's is not."""
    rng = np.random.default_rng(0)
    p, draws = 0.3, 200_000
    correct = rng.random((draws, 4)) < p
    truth = 1 - (1 - p) ** 2
    assert abs(pass_at_k(correct, 2).mean() - truth) < 0.003
    plug_in = (1 - (1 - correct.mean(axis=1)) ** 2).mean()
    assert abs(plug_in - truth) > 0.02


def test_pass_at_k_with_the_papers_32_answers_does_not_overflow():
    correct = np.zeros((1, 32), dtype=bool)
    correct[0, 3] = True
    np.testing.assert_allclose(pass_at_k(correct, 16), [0.5])
    assert pass_at_k(correct, 32) == 1
    for k in (0, 33):
        with pytest.raises(ValueError, match=f"pass@{k} cannot be estimated from 32"):
            pass_at_k(correct, k)


def test_which_k():
    assert powers_of_two(1) == [1]
    assert powers_of_two(32) == [1, 2, 4, 8, 16, 32]
    assert powers_of_two(6) == [1, 2, 4, 6]


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    """30 prompts of different difficulty, 8 answers each, many times over."""
    rng = np.random.default_rng(1)
    hits = 0
    for trial in range(300):
        difficulty = rng.beta(0.6, 0.9, 30)
        per_prompt = (rng.random((30, 8)) < difficulty[:, None]).mean(axis=1)
        low, high = bootstrap_interval(per_prompt, seed=trial)
        hits += low <= 0.4 <= high  # the mean of that beta distribution
    assert 0.88 < hits / 300 < 0.98
    assert bootstrap_interval(per_prompt) == bootstrap_interval(per_prompt)


def test_metrics_of_a_set():
    correct = np.array([[True, False], [False, False], [True, True]])
    metrics = accuracy_metrics(correct)
    assert metrics["accuracy"] == metrics["pass@1"] == 0.5
    assert metrics["pass@2"] == pytest.approx(2 / 3)
    assert metrics["accuracy_low"] < 0.5 < metrics["accuracy_high"]
