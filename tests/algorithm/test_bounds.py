"""Theorems 3.1 and 3.2 and Appendix B.3 on every sequence of up to 4 tokens over up to 4, exactly.

The reference walks the tree of sequences recursively with plain floats and dictionaries; it shares no array layout
with the code.
"""

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_dppo.algorithm import policy_loss, presets
from tests.algorithm.bounds import ImprovementBound, absorb_after, improvement_bound, token_probabilities

END = 0


def random_policy(vocab: int, horizon: int, scale: float, generator: torch.Generator) -> list[Tensor]:
    return [
        torch.softmax(scale * torch.randn(vocab**t, vocab, generator=generator, dtype=torch.float64), -1)
        for t in range(horizon)
    ]


def nudged(policy: list[Tensor], scale: float, generator: torch.Generator) -> list[Tensor]:
    return [
        torch.softmax(p.log() + scale * torch.randn(p.shape, generator=generator, dtype=torch.float64), -1)
        for p in policy
    ]


def row_of(policy: list[Tensor], prefix: tuple[int, ...]) -> list[float]:
    vocab = policy[0].shape[-1]
    index = 0
    for token in prefix:
        index = index * vocab + token
    return policy[len(prefix)][index].tolist()


def answers(vocab: int, horizon: int, prefix: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """All answers: they end with END or at the horizon."""
    if len(prefix) == horizon or (prefix and prefix[-1] == END):
        yield prefix
        return
    for token in range(vocab):
        yield from answers(vocab, horizon, (*prefix, token))


def number(answer: tuple[int, ...], vocab: int, horizon: int) -> int:
    """Position of an answer, its absorbing end repeated, among the V**T sequences."""
    index = 0
    for token in answer + (END,) * (horizon - len(answer)):
        index = index * vocab + token
    return index


def tv(p: list[float], q: list[float]) -> float:
    return 0.5 * math.fsum(abs(a - b) for a, b in zip(p, q, strict=True))


def reference(
    mu: list[Tensor], pi: list[Tensor], reward: dict[tuple[int, ...], float], vocab: int, horizon: int
) -> ImprovementBound:
    improvement, surrogate, error, expected_tv, max_tv = [], [], [], [], 0.0
    for answer, value in reward.items():
        p_mu = [row_of(mu, answer[:t])[token] for t, token in enumerate(answer)]
        p_pi = [row_of(pi, answer[:t])[token] for t, token in enumerate(answer)]
        ratio = [b / a for a, b in zip(p_mu, p_pi, strict=True)]
        distance = [tv(row_of(mu, answer[:t]), row_of(pi, answer[:t])) for t in range(len(answer))]
        weight = math.prod(p_mu)
        improvement.append((math.prod(p_pi) - weight) * value)
        surrogate.append(weight * value * math.fsum(r - 1 for r in ratio))
        error.append(weight * value * math.fsum((r - 1) * (1 - math.prod(ratio[t + 1 :])) for t, r in enumerate(ratio)))
        expected_tv.append(weight * math.fsum(distance))
        max_tv = max(max_tv, *distance)
    xi = max(map(abs, reward.values()))
    return ImprovementBound(
        improvement=math.fsum(improvement),
        surrogate=math.fsum(surrogate),
        error=math.fsum(error),
        quadratic_penalty=2 * xi * horizon * (horizon - 1) * max_tv**2,
        linear_penalty=4 * xi * math.fsum(expected_tv),
    )


@settings(max_examples=60)
@given(
    vocab=st.integers(2, 4),
    horizon=st.integers(1, 4),
    distance=st.sampled_from([1e-3, 0.03, 0.3, 1.0, 4.0]),
    seed=st.integers(0, 2**31),
)
def test_identity_and_bounds_on_variable_length_answers(vocab: int, horizon: int, distance: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mu = random_policy(vocab, horizon, 1.0, generator)
    pi = nudged(mu, distance, generator)
    reward = {a: float(torch.randn((), generator=generator)) for a in answers(vocab, horizon)}
    flat = torch.zeros(vocab**horizon, dtype=torch.float64)
    for answer, value in reward.items():
        flat[number(answer, vocab, horizon)] = value

    got = improvement_bound(absorb_after(mu, END), absorb_after(pi, END), flat)
    want = reference(mu, pi, reward, vocab, horizon)
    scale = max(1.0, abs(want.surrogate), abs(want.error))
    for name in ("improvement", "surrogate", "error", "quadratic_penalty", "linear_penalty"):
        assert getattr(got, name) == pytest.approx(getattr(want, name), rel=1e-11, abs=1e-12 * scale), name

    assert got.improvement == pytest.approx(got.surrogate - got.error, abs=1e-12 * scale)  # Theorem 3.1
    slack = 1e-12 * scale
    assert got.improvement >= got.surrogate - got.quadratic_penalty - slack  # Theorem 3.2, Eq. 7
    assert got.improvement >= got.surrogate - got.linear_penalty - slack  # Eq. 20
    assert got.improvement >= got.lower_bound - slack  # Appendix B.3
    assert got.lower_bound == max(got.surrogate - got.quadratic_penalty, got.surrogate - got.linear_penalty)
    assert got.error <= min(got.quadratic_penalty, got.linear_penalty) + slack


@settings(max_examples=20)
@given(seed=st.integers(0, 2**31), distance=st.sampled_from([0.1, 1.0]))
def test_fixed_length_sequences(seed: int, distance: float) -> None:
    """Without an end token: all 4**4 sequences, 0 < T (T - 1) in force."""
    generator = torch.Generator().manual_seed(seed)
    mu = random_policy(4, 4, 1.0, generator)
    pi = nudged(mu, distance, generator)
    assert token_probabilities(mu).prod(-1).sum().item() == pytest.approx(1, abs=1e-13)
    bound = improvement_bound(mu, pi, torch.randn(256, generator=generator, dtype=torch.float64))
    assert bound.improvement == pytest.approx(bound.surrogate - bound.error, abs=1e-12)
    assert bound.improvement >= bound.lower_bound - 1e-12


def test_the_surrogate_is_first_order() -> None:
    """The error of the surrogate falls with the square of the step, the improvement itself linearly."""
    bounds = []
    for step in (1e-2, 1e-3):
        generator = torch.Generator().manual_seed(3)
        mu = random_policy(3, 3, 1.0, generator)
        rewards = torch.randn(27, generator=generator, dtype=torch.float64)
        bounds.append(improvement_bound(mu, nudged(mu, step, generator), rewards))
    assert bounds[0].error / bounds[1].error == pytest.approx(100, rel=0.1)
    assert bounds[0].surrogate / bounds[1].surrogate == pytest.approx(10, rel=0.1)


def test_equal_policies_and_a_horizon_of_one() -> None:
    generator = torch.Generator().manual_seed(0)
    mu = random_policy(3, 2, 1.0, generator)
    same = improvement_bound(mu, mu, torch.ones(9))
    assert same == ImprovementBound(0.0, 0.0, 0.0, 0.0, 0.0)
    one, other = random_policy(4, 1, 1.0, generator), random_policy(4, 1, 1.0, generator)
    bound = improvement_bound(one, other, torch.randn(4, generator=generator))
    assert bound.quadratic_penalty == 0  # one token: the surrogate is the improvement
    assert bound.improvement == pytest.approx(bound.surrogate, abs=1e-14)


def test_sample_estimates_average_to_the_exact_surrogate_and_penalty() -> None:
    """What training reports is unbiased: averaged over every sequence with its probability under mu, the estimate of
    Eq. 19 is the linear penalty of Eq. 20, and the reported surrogate is Eq. 5."""
    generator = torch.Generator().manual_seed(1)
    vocab, horizon = 4, 3
    mu = absorb_after(random_policy(vocab, horizon, 1.0, generator), END)
    pi = absorb_after(nudged(mu, 0.7, generator), END)
    pi = [torch.where(m == 0, 0.0, p) for m, p in zip(mu, pi, strict=True)]
    rewards = torch.randn(vocab**horizon, generator=generator, dtype=torch.float64)
    bound = improvement_bound(mu, pi, rewards)
    xi = float(rewards.abs().max())

    mu_token, pi_token = token_probabilities(mu), token_probabilities(pi)
    surrogate, penalty = 0.0, 0.0
    for i in range(vocab**horizon):
        weight = float(mu_token[i].prod())
        if weight == 0:
            continue
        loss = policy_loss(
            presets.get("pg-is"),
            pi_token[i].log(),
            mu_token[i].log(),
            torch.zeros(horizon, dtype=torch.float64),
            loss_mask=torch.ones(horizon, dtype=torch.bool),
            returns=rewards[i].expand(horizon),
        )
        metrics = loss.metrics.finalize(1, reward_bound=xi)
        surrogate += weight * metrics["surrogate"]
        penalty += weight * metrics["linear_penalty_estimate"]
    assert surrogate == pytest.approx(bound.surrogate, rel=1e-12)
    assert penalty == pytest.approx(bound.linear_penalty, rel=1e-12)


def test_equal_policies_have_no_penalty_whatever_the_reward() -> None:
    equal = torch.full((3,), 0.5, dtype=torch.float64).log()
    mask = torch.ones(3, dtype=torch.bool)
    loss = policy_loss(presets.get("pg-is"), equal, equal, torch.zeros_like(equal), loss_mask=mask, returns=equal)
    assert loss.metrics.finalize(1, reward_bound=math.inf)["linear_penalty_estimate"] == 0.0


def test_bad_tables_are_refused() -> None:
    generator = torch.Generator().manual_seed(0)
    mu = random_policy(2, 2, 1.0, generator)
    with pytest.raises(ValueError, match="rewards must be one per sequence"):
        improvement_bound(mu, mu, torch.zeros(3))
    with pytest.raises(ValueError, match=r"pi must hold one \[V\*\*t, V\] table"):
        improvement_bound(mu, mu[:1], torch.zeros(4))
    with pytest.raises(ValueError, match=r"pi\[1\] has a row that is no probability distribution"):
        improvement_bound(mu, [mu[0], mu[1] * 1.1], torch.zeros(4))
    never = [torch.tensor([[1.0, 0.0]]), mu[1]]
    with pytest.raises(ValueError, match="pi draws a sequence that mu never does"):
        improvement_bound(never, mu, torch.zeros(4))
    assert math.isfinite(improvement_bound(mu, never, torch.ones(4)).surrogate)
