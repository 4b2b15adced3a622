"""The paper's performance identity and its lower bounds, for policies that can be enumerated.

A tabular policy over V tokens and horizon T is a list of T tensors: entry t is `[V**t, V]`, the distribution of
token t after each prefix of t tokens, prefixes numbered in base V with the first token most significant. Sequences
y = 0 .. V**T - 1 are numbered the same way, so rewards are `[V**T]`. Answers shorter than T are an absorbing end
token (`absorb_after`): both policies repeat it with probability 1, so its ratio is 1 and every sum over t skips it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

TabularPolicy = Sequence[Float[Tensor, "prefixes V"]]


@dataclass(frozen=True)
class ImprovementBound:
    """Theorem 3.1 and the bounds on it for one pair of policies, exact by enumeration."""

    improvement: float
    """J(pi) - J(mu), from its definition."""
    surrogate: float
    """L'_mu(pi), Eq. 5."""
    error: float
    """Delta(mu, pi), Eq. 6; improvement = surrogate - error is Theorem 3.1."""
    quadratic_penalty: float
    """2 xi T (T - 1) max D_TV^2, Eq. 7."""
    linear_penalty: float
    """4 xi E_mu[sum_t D_TV], Eq. 20."""

    @property
    def lower_bound(self) -> float:
        """Appendix B.3's composite bound on the improvement: the surrogate minus the smaller penalty."""
        return self.surrogate - min(self.quadratic_penalty, self.linear_penalty)


def absorb_after(policy: TabularPolicy, end_token: int) -> list[Tensor]:
    """The policy with `end_token` repeated for ever once it was drawn, so that answers may be shorter than T."""
    vocab = policy[0].shape[-1]
    ended = torch.zeros(1, dtype=torch.bool)
    absorbed = []
    for step in policy:
        only_end = torch.zeros_like(step)
        only_end[:, end_token] = 1.0
        absorbed.append(torch.where(ended[:, None], only_end, step))
        is_end = torch.arange(vocab) == end_token
        ended = (ended[:, None] | is_end).flatten()
    return absorbed


def token_probabilities(policy: TabularPolicy) -> Float[Tensor, "sequences T"]:
    """Probability of each token of each of the V**T sequences given its prefix, float64."""
    horizon, vocab = len(policy), policy[0].shape[-1]
    sequences = torch.arange(vocab**horizon)
    columns = []
    for t, step in enumerate(policy):
        prefix_and_token = sequences // vocab ** (horizon - t - 1)
        columns.append(step.double().flatten()[prefix_and_token])
    return torch.stack(columns, dim=-1)


def improvement_bound(mu: TabularPolicy, pi: TabularPolicy, rewards: Float[Tensor, " sequences"]) -> ImprovementBound:
    """Every quantity of Theorems 3.1 and 3.2 and Appendix B.3, by enumerating all V**T sequences in float64.

    Args: two tabular policies of one shape (module docstring) and the reward of every sequence.
    Raises ValueError where the shapes disagree, where a row is no distribution, or where pi can draw a sequence that
    mu cannot: expectations under mu do not see it, and the identity does not hold.
    """
    _check_tables(mu, pi, rewards)
    horizon = len(mu)
    rewards = rewards.double()
    mu_token, pi_token = token_probabilities(mu), token_probabilities(pi)
    mu_sequence, pi_sequence = mu_token.prod(-1), pi_token.prod(-1)
    if bool((pi_sequence[mu_sequence == 0] > 0).any()):
        raise ValueError("pi draws a sequence that mu never does; the identity needs mu > 0 wherever pi > 0")

    # Sequences that mu never draws have weight 0 in every expectation; any finite ratio will do there.
    ratio = torch.where(mu_token > 0, pi_token / mu_token, 1.0)
    suffix = ratio.flip(-1).cumprod(-1).flip(-1)
    future = torch.cat([suffix[:, 1:], torch.ones_like(suffix[:, :1])], dim=-1)

    tv = [0.5 * (m.double() - p.double()).abs().sum(-1) for m, p in zip(mu, pi, strict=True)]
    expected_tv = torch.zeros((), dtype=torch.float64)
    state = torch.ones(1, dtype=torch.float64)
    for step, distance in zip(mu, tv, strict=True):
        expected_tv = expected_tv + (state * distance).sum()
        state = (state[:, None] * step.double()).flatten()
    max_tv = max(float(distance.max()) for distance in tv)
    xi = float(rewards.abs().max())

    return ImprovementBound(
        improvement=float(((pi_sequence - mu_sequence) * rewards).sum()),
        surrogate=float((mu_sequence * rewards * (ratio - 1).sum(-1)).sum()),
        error=float((mu_sequence * rewards * ((ratio - 1) * (1 - future)).sum(-1)).sum()),
        quadratic_penalty=2 * xi * horizon * (horizon - 1) * max_tv**2,
        linear_penalty=4 * xi * float(expected_tv),
    )


def _check_tables(mu: TabularPolicy, pi: TabularPolicy, rewards: Tensor) -> None:
    vocab, horizon = mu[0].shape[-1], len(mu)
    expected = [(vocab**t, vocab) for t in range(horizon)]
    for name, policy in (("mu", mu), ("pi", pi)):
        shapes = [tuple(step.shape) for step in policy]
        if shapes != expected:
            raise ValueError(f"{name} must hold one [V**t, V] table per token, {expected}, not {shapes}")
        for t, step in enumerate(policy):
            sums = step.double().sum(-1)
            if bool((step < 0).any()) or not torch.allclose(sums, torch.ones_like(sums), rtol=0, atol=1e-9):
                raise ValueError(f"{name}[{t}] has a row that is no probability distribution")
    if rewards.shape != (vocab**horizon,):
        raise ValueError(f"rewards must be one per sequence, [{vocab**horizon}], not {tuple(rewards.shape)}")
