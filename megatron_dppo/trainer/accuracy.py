"""What samples say about accuracy: avg@n, pass@k, and how sure one can be."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
CONFIDENCE = 0.95


def pass_at_k(correct: NDArray[np.bool_], k: int) -> NDArray[np.float64]:
    """Probability that at least one of k answers is right, per prompt `[P]`, from `n >= k` answers `[P, n]`:

        1 - C(n - c, k) / C(n, k)      c right answers among the n

    This is unbiased, unlike 1 - (1 - c/n)^k (Chen et al., arXiv 2107.03374, Eq. 1). Computed as a product, which does
    not overflow. Raises ValueError for k outside 1..n.
    """
    samples = correct.shape[1]
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} cannot be estimated from {samples} answers per prompt")
    wrong = samples - correct.sum(axis=1)
    factors = 1.0 - k / np.arange(1, samples + 1)  # C(w, k) / C(n, k) is the product of (1 - k / i) for i = w + 1 .. n
    return np.array([1.0 if w < k else 1.0 - np.prod(factors[w:]) for w in wrong.tolist()])


def powers_of_two(samples: int) -> list[int]:
    """The k for which pass@k is reported: 1, 2, 4, ... up to `samples`, and `samples` itself."""
    ks = [1]
    while ks[-1] * 2 <= samples:
        ks.append(ks[-1] * 2)
    return ks if ks[-1] == samples else [*ks, samples]


def bootstrap_interval(per_prompt: NDArray[np.float64], seed: int = 0) -> tuple[float, float]:
    """95 % percentile interval of the mean over prompts, by 2,000 resamples of the prompts with replacement.

    It covers the choice of prompts and, with it, of their answers; few prompts (AIME has 30) give a wide one. The same
    seed gives the same interval.
    """
    rng = np.random.default_rng(seed)
    count = len(per_prompt)
    means = per_prompt[rng.integers(0, count, (RESAMPLES, count))].mean(axis=1)
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def accuracy_metrics(correct: NDArray[np.bool_]) -> dict[str, float]:
    """`accuracy` (avg@n), `accuracy_low` and `accuracy_high` (the bootstrap interval), `pass@k`; `correct` `[P, n]`."""
    per_prompt = correct.mean(axis=1)
    low, high = bootstrap_interval(per_prompt)
    result = {"accuracy": float(per_prompt.mean()), "accuracy_low": low, "accuracy_high": high}
    return result | {f"pass@{k}": float(pass_at_k(correct, k).mean()) for k in powers_of_two(correct.shape[1])}
