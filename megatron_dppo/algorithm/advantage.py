"""Advantages of sequences from their rewards and their group (the answers to one prompt)."""

from collections.abc import Callable
from enum import StrEnum

import torch
from jaxtyping import Float, Int
from torch import Tensor

from megatron_dppo.errors import UserError
from megatron_dppo.launch.imports import load_callable

AdvantageEstimator = Callable[[Float[Tensor, " N"], Int[Tensor, " N"]], Float[Tensor, " N"]]
"""From the rewards of all answers of a step and the number of each one's group."""


class Baseline(StrEnum):
    """What is subtracted from the reward."""

    MEAN = "mean"
    """The mean of the group, the answer itself included: the paper's choice (Section 4.1)."""
    LEAVE_ONE_OUT = "leave-one-out"
    """The mean of the other answers of the group (RLOO): G / (G - 1) times the above."""
    NONE = "none"
    """0: the reward itself."""


def group_advantages(
    rewards: Float[Tensor, " N"],
    group_ids: Int[Tensor, " N"],
    *,
    baseline: Baseline | str = Baseline.MEAN,
    normalize_std: bool = False,
) -> Float[Tensor, " N"]:
    """A_i = R_i - baseline of i's group, optionally divided by (std of the group + 1e-6).

    The paper's estimate is the default: group mean, no division (Section 4.1, Appendix D.1). The standard deviation
    is the sample one (n - 1). Groups may be ragged, in any order, and are named by any integers.

    A group of one answer, and a group whose rewards are all equal, says nothing about its answers: its advantages
    are exactly 0 under both group baselines, not rounding noise divided by 1e-6. With `Baseline.NONE` the
    reward stays as it is, and a group without spread is divided by nothing.

    Returns the dtype of `rewards`, [N], without gradient. Raises ValueError for a reward that is not finite, naming
    the rows, and for shapes that do not agree. All answers of a group must be present: no collective is made.
    """
    baseline = Baseline(baseline)
    if rewards.ndim != 1 or rewards.shape != group_ids.shape:
        raise ValueError(
            f"rewards and group_ids must be one flat array each, of equal length: "
            f"{tuple(rewards.shape)} and {tuple(group_ids.shape)}"
        )
    finite = torch.isfinite(rewards)
    if not bool(finite.all()):
        rows = (~finite).nonzero().flatten().tolist()
        raise ValueError(
            f"rewards must be finite; rows {rows[:10]} are not (of {len(rows)}): check the reward function"
        )
    if rewards.numel() == 0:
        return rewards.detach().clone()

    reward = rewards.detach().double()
    _, group = torch.unique(group_ids, return_inverse=True)
    groups = int(group.max()) + 1

    def total(values: Tensor) -> Tensor:
        return reward.new_zeros(groups).index_add_(0, group, values)[group]

    size = total(torch.ones_like(reward))
    centred = reward - total(reward) / size
    low = reward.new_zeros(groups).scatter_reduce_(0, group, reward, "amin", include_self=False)[group]
    high = reward.new_zeros(groups).scatter_reduce_(0, group, reward, "amax", include_self=False)[group]
    spread = high > low

    if baseline is Baseline.MEAN:
        advantage = torch.where(spread, centred, 0.0)
    elif baseline is Baseline.LEAVE_ONE_OUT:
        advantage = torch.where(spread, centred * size / (size - 1).clamp(min=1), 0.0)
    else:
        advantage = reward
    if normalize_std:
        std = (total(centred**2) / (size - 1).clamp(min=1)).sqrt()
        advantage = torch.where(spread, advantage / (std + 1e-6), advantage)
    return advantage.to(rewards.dtype)


def own_advantages(path: str, rewards: Float[Tensor, " N"], group_ids: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    """What the function of a user's own makes of rewards, `[N]` in their dtype, without gradient. Every rank calls it,
    and the controller for the samples that it writes down, so it must give all the same.

    Raises UserError, naming the path, where it raises, or returns anything but `[N]` finite numbers.
    """
    named = "algorithm.advantage="
    function = load_callable(path, named=named)
    try:
        found = function(rewards.detach().clone(), group_ids.clone())
    except Exception as error:
        raise UserError(f"{named}{path}: raised {type(error).__name__}: {error}; correct it") from error
    if not isinstance(found, Tensor) or found.shape != rewards.shape or not found.is_floating_point():
        what = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise UserError(
            f"{named}{path}: must return one floating number per answer, {list(rewards.shape)}, and returned {what}; "
            "correct it"
        )
    if not torch.isfinite(found).all():
        raise UserError(f"{named}{path}: returned {float(found[~torch.isfinite(found)][0])}; correct it")
    return found.detach().to(rewards.dtype)


def try_advantages(path: str) -> bool:
    """Call a function of a user's own on made-up rewards, before anything is sampled: groups that differ, that are all
    alike, and of one. Whether answers of equal rewards get an advantage from it.

    Raises as `own_advantages`, and where it gives the same rewards something else after it has seen others.
    """
    rewards, groups = torch.tensor([1.0, 0.0, 0.5, 1.0, 1.0, 0.0]), torch.tensor([0, 0, 0, 1, 1, 2])
    first, others, again = (own_advantages(path, seen, groups) for seen in (rewards, 1 - rewards, rewards))
    if not torch.equal(first, again):
        raise UserError(
            f"algorithm.advantage={path}: gave the same rewards other advantages when called again, and ranks call it "
            "independently; let it keep no state and draw no random numbers"
        )
    alike = torch.stack([first, others])[:, groups == 1]
    return bool(alike.abs().max() > 1e-4)  # rounding is less
