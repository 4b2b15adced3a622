"""Group advantages: the paper's default, the alternatives, and the groups that say nothing."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_dppo.algorithm import Baseline, group_advantages


def reference(rewards: list[float], groups: list[int], baseline: str, std: bool) -> list[float]:
    result = []
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        others = [r for j, (r, g) in enumerate(zip(rewards, groups, strict=True)) if g == group and j != i]
        mean = math.fsum(members) / len(members)
        base = {
            "mean": mean,
            "leave-one-out": math.fsum(others) / len(others) if others else reward,
            "none": 0.0,
        }[baseline]
        advantage = reward - base
        if len(set(members)) > 1 and std:
            advantage /= math.sqrt(math.fsum((m - mean) ** 2 for m in members) / (len(members) - 1)) + 1e-6
        result.append(advantage)
    return result


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 1.0, 0.1, -1.0, 0.3]), st.integers(-3, 3)), min_size=1, max_size=30),
    st.sampled_from(list(Baseline)),
    st.booleans(),
)
def test_ragged_groups_in_any_order(pairs: list[tuple[float, int]], baseline: Baseline, std: bool) -> None:
    rewards, groups = [r for r, _ in pairs], [g for _, g in pairs]
    got = group_advantages(
        torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), baseline=baseline, normalize_std=std
    )
    assert got.tolist() == pytest.approx(reference(rewards, groups, baseline, std), abs=1e-12)


def test_the_default_is_the_group_mean_without_std() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0])
    got = group_advantages(rewards, torch.tensor([7, 7, 7, 7, 9, 9]))
    assert got.tolist() == [0.75, -0.25, -0.25, -0.25, 0.0, 0.0]
    assert got.dtype == torch.float32


@pytest.mark.parametrize("baseline", [Baseline.MEAN, Baseline.LEAVE_ONE_OUT])
@pytest.mark.parametrize("std", [False, True])
def test_groups_of_one_and_equal_rewards_are_exactly_zero(baseline: Baseline, std: bool) -> None:
    """0.1 summed three times is not 0.3: the mean of equal rewards is not quite the reward, but they say nothing."""
    rewards = torch.tensor([5.0, 0.1, 0.1, 0.1, 0.7, 0.7, 0.7, 0.7, 0.7, 0.7], dtype=torch.float64)
    groups = torch.tensor([0, 1, 1, 1, 2, 2, 2, 2, 2, 2])
    assert group_advantages(rewards, groups, baseline=baseline, normalize_std=std).tolist() == [0.0] * 10


def test_mean_advantages_of_a_group_sum_to_zero_and_normalised_ones_have_unit_std() -> None:
    rewards = torch.rand(16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    groups = torch.arange(16) % 2
    assert group_advantages(rewards, groups)[groups == 0].sum().item() == pytest.approx(0, abs=1e-14)
    scaled = group_advantages(rewards, groups, normalize_std=True)
    assert scaled[groups == 1].std().item() == pytest.approx(1, abs=1e-5)


def test_no_sequences() -> None:
    assert group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"rows \[1, 2\] are not"):
        group_advantages(torch.tensor([0.0, math.nan, math.inf]), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="equal length"):
        group_advantages(torch.zeros(3), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="'median' is not a valid Baseline"):
        group_advantages(torch.zeros(2), torch.zeros(2, dtype=torch.int64), baseline="median")
