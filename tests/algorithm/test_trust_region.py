"""The four masks at and around their thresholds, and the numbers of Section 4.2."""

import itertools

import pytest
import torch

from megatron_dppo.algorithm.trust_region import (
    divergence_mask,
    negative_drop_mask,
    ratio_clip_mask,
    relaxed_clip_mask,
)


def row(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_ratio_clip_blocks_only_in_the_direction_of_the_advantage() -> None:
    ratio = row(2.0, 2.0, 2.0, 0.1, 0.1, 0.1)
    advantage = row(1, -1, 0, 1, -1, 0)
    keep = ratio_clip_mask(ratio, advantage, clip_low=0.2, clip_high=0.28)
    assert keep.tolist() == [False, True, True, True, False, True]


def test_ratio_clip_thresholds_are_strict_and_asymmetric() -> None:
    above, below = 1.0 + 0.28, 1.0 - 0.2
    ratio = row(
        above, torch.nextafter(row(above), row(9.0)).item(), below, torch.nextafter(row(below), row(0.0)).item()
    )
    advantage = row(1, 1, -1, -1)
    assert ratio_clip_mask(ratio, advantage, clip_low=0.2, clip_high=0.28).tolist() == [True, False, True, False]
    assert ratio_clip_mask(row(1.25, 0.75), row(1, -1), clip_low=0.2, clip_high=0.28).tolist() == [True, False]


def test_divergence_needs_direction_and_distance() -> None:
    for ratio, advantage, divergence in itertools.product((0.5, 1.0, 2.0), (-1, 0, 1), (0.1, 0.15, 0.2)):
        moves_away = (advantage > 0 and ratio > 1) or (advantage < 0 and ratio < 1)
        expected = not (moves_away and divergence > 0.15)
        keep = divergence_mask(row(ratio), row(divergence), row(advantage), delta_negative=0.15, delta_positive=0.15)
        assert keep.item() is expected, (ratio, advantage, divergence)


def test_divergence_thresholds_may_differ_by_sign() -> None:
    ratio, divergence, advantage = row(2.0, 0.5), row(0.1, 0.1), row(1, -1)
    keep = divergence_mask(ratio, divergence, advantage, delta_negative=0.05, delta_positive=0.2)
    assert keep.tolist() == [True, False]


def test_infinite_divergence_blocks_and_nan_is_kept_to_surface_in_the_loss() -> None:
    ratio, advantage = row(0.5, 0.5), row(-1, -1)
    keep = divergence_mask(ratio, row(torch.inf, torch.nan), advantage, delta_negative=0.05, delta_positive=0.05)
    assert keep.tolist() == [False, True]


def test_minimal_mask_includes_its_threshold() -> None:
    """Section 5.3 writes >= where everything else writes >."""
    anchor, pi = row(1.0, 1.0, 1.0, 1.0, 0.5), row(0.5, 0.5, 0.5 + 1e-12, 0.4, 1.0)
    advantage = row(-1, 1, -1, -1, -1)
    assert negative_drop_mask(anchor, pi, advantage, delta=0.5).tolist() == [False, True, True, False, True]


@pytest.mark.parametrize(("low", "high"), [(True, False), (False, True), (True, True)])
def test_relaxed_clip_lifts_the_named_end_for_rare_tokens_only(low: bool, high: bool) -> None:
    prob = row(0.05, 0.1, 0.05, 0.1)  # alpha itself is not below alpha
    ratio, advantage = row(3.0, 3.0, 0.1, 0.1), row(1, 1, -1, -1)
    keep = relaxed_clip_mask(
        ratio, advantage, prob, clip_low=0.2, clip_high=0.28, relax_below=0.1, relax_low=low, relax_high=high
    )
    assert keep.tolist() == [high, False, low, False]


def test_section_4_2_numbers() -> None:
    """A rare token that grows a hundredfold is clipped by PPO and kept by DPPO; a dominant token that loses a fifth
    of the mass is kept by PPO and blocked by DPPO at delta = 0.15."""
    mu, pi, advantage = row(1e-4, 0.99), row(1e-2, 0.80), row(1, -1)
    ratio = pi / mu
    ppo = ratio_clip_mask(ratio, advantage, clip_low=0.2, clip_high=0.2)
    dppo = divergence_mask(ratio, (mu - pi).abs(), advantage, delta_negative=0.15, delta_positive=0.15)
    assert ppo.tolist() == [False, True]
    assert dppo.tolist() == [True, False]
