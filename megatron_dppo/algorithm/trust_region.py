"""The masks M_t of Eq. 23: True keeps a token's update, False blocks it.

Each function states one rule of the paper. All are elementwise over flat [T] tensors and decide without
gradient. A token whose advantage is 0 is never blocked (its update is 0). Comparisons are strict (`>`), except in
`negative_drop_mask`, where the paper writes `>=`. A NaN compares false everywhere, so it is kept and surfaces in
the loss, where the finite check of the training step sees it, instead of vanishing behind a mask.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@torch.no_grad()
def ratio_clip_mask(
    ratio: Float[Tensor, " T"],
    advantages: Float[Tensor, " T"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Bool[Tensor, " T"]:
    """PPO's clip as a mask (Appendix D.1): blocks r > 1 + clip_high for A > 0 and r < 1 - clip_low for A < 0.

    With `dual_clip` = c also r > c for A < 0, where max(min(r A, clip(r) A), c A) is flat (arXiv 1912.09729, Eq. 5).
    """
    too_high = (advantages > 0) & (ratio > 1.0 + clip_high)
    too_low = (advantages < 0) & (ratio < 1.0 - clip_low)
    if dual_clip is not None:
        too_high |= (advantages < 0) & (ratio > dual_clip)
    return ~(too_high | too_low)


@torch.no_grad()
def ratio_band_mask(ratio: Float[Tensor, " T"], *, low: float | None, high: float | None) -> Bool[Tensor, " T"]:
    """Drops r < low and r > high for either sign of the advantage: M(k) of IcePop (arXiv 2512.16144, Eq. 1), and with
    ratios of whole sequences the masked importance sampling of Liu, Li et al. 2025."""
    outside = torch.zeros_like(ratio, dtype=torch.bool)
    if low is not None:
        outside |= ratio < low
    if high is not None:
        outside |= ratio > high
    return ~outside


@torch.no_grad()
def relaxed_clip_mask(
    ratio: Float[Tensor, " T"],
    advantages: Float[Tensor, " T"],
    anchor_prob: Float[Tensor, " T"],
    *,
    clip_low: float,
    clip_high: float,
    relax_below: float,
    relax_low: bool,
    relax_high: bool,
) -> Bool[Tensor, " T"]:
    """PPO's clip with an end lifted (threshold = infinity) for tokens with mu < relax_below (Section 6).

    `relax_high` lifts the upper end, `relax_low` the lower end, both together are the paper's Relax-both.
    """
    relaxed = anchor_prob < relax_below
    too_high = (advantages > 0) & (ratio > 1.0 + clip_high)
    too_low = (advantages < 0) & (ratio < 1.0 - clip_low)
    if relax_high:
        too_high &= ~relaxed
    if relax_low:
        too_low &= ~relaxed
    return ~(too_high | too_low)


@torch.no_grad()
def divergence_mask(
    ratio: Float[Tensor, " T"],
    divergence: Float[Tensor, " T"],
    advantages: Float[Tensor, " T"],
    *,
    delta_negative: float,
    delta_positive: float,
) -> Bool[Tensor, " T"]:
    """DPPO's mask (Eq. 12): blocks a token that moves away from r = 1 while D > delta.

    The paper has one delta; the two signs of the advantage may have their own here (`delta_positive` where A > 0,
    `delta_negative` where A < 0).
    """
    up = (advantages > 0) & (ratio > 1.0) & (divergence > delta_positive)
    down = (advantages < 0) & (ratio < 1.0) & (divergence > delta_negative)
    return ~(up | down)


@torch.no_grad()
def negative_drop_mask(
    anchor_prob: Float[Tensor, " T"], pi_prob: Float[Tensor, " T"], advantages: Float[Tensor, " T"], *, delta: float
) -> Bool[Tensor, " T"]:
    """The minimal mask (Section 5.3): blocks only A < 0 with mu(a) - pi(a) >= delta."""
    return ~((advantages < 0) & (anchor_prob - pi_prob >= delta))
