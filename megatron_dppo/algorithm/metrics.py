"""Training metrics over tokens, as sums and maxima that merge exactly over microbatches and ranks.

Computed once, where the loss is (the last pipeline stage). `TokenMetrics` is two flat float64 tensors: add `sums`
and take the elementwise maximum of `maxima`, over microbatches by `merge` and over ranks by one SUM and one MAX
all-reduce of the caller's; then `finalize` divides. Ratios and probability differences are always those of the
trained policy pi to the rollout policy mu, whatever the preset's anchor, so that runs compare.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

BAD_UPDATE_DROP = 0.5
"""A bad update is a negative sample with mu - pi at or above this (Section 5.3)."""

BANDS = {"low": (0.0, 0.1), "middle": (0.1, 0.9), "high": (0.9, math.inf)}
"""Bands of mu, from the first bound up to the second: a ratio is volatile where mu is low (Figure 2)."""

QUANTILES = (0.001, 0.01, 0.5, 0.99, 0.999)

# Histogram of log r: one bin around 0, then log-spaced bins of |log r| on either side; the last is open-ended.
_SMALLEST, _LARGEST, _BINS_PER_SIDE = 1e-6, 100.0, 320
_BINS = 2 * _BINS_PER_SIDE + 1

_SUMS = (
    "tokens",
    "positive_tokens",
    "negative_tokens",
    "masked_positive",
    "masked_negative",
    "truncated",
    "bad_updates",
    "abs_prob_diff",
    "abs_ratio_deviation",
    "ratio",
    "surrogate",
    "divergence_tokens",
    "divergence",
    "entropy_tokens",
    "entropy",
    "penalty_tokens",
    "penalty",
    "masked_mu_positive",
    "masked_mu_negative",
    "masked_entropy_positive",
    "masked_entropy_negative",
    *(f"{what}_{band}" for band in BANDS for what in ("tokens", "abs_log_ratio", "abs_prob_diff")),
)
_MAXIMA = ("abs_prob_diff", "divergence", "log_ratio", "negative_log_ratio", "abs_return")


@dataclass(frozen=True)
class TokenMetrics:
    """Mergeable sums and maxima of one or more microbatches. Both tensors are flat float64 of fixed length."""

    sums: Float64[Tensor, " n"]
    """Reduce over ranks by SUM. Counts, totals, then the histogram of log r."""
    maxima: Float64[Tensor, " m"]
    """Reduce over ranks by MAX; -inf where nothing was seen."""

    @classmethod
    def empty(cls, device: torch.device | str = "cpu") -> "TokenMetrics":
        """Of no tokens: the neutral element of `merge`, for ranks that hold none."""
        return cls(
            torch.zeros(len(_SUMS) + _BINS, dtype=torch.float64, device=device),
            torch.full((len(_MAXIMA),), -math.inf, dtype=torch.float64, device=device),
        )

    def merge(self, other: "TokenMetrics") -> "TokenMetrics":
        """The metrics of both sets of tokens together."""
        return TokenMetrics(self.sums + other.sums, torch.maximum(self.maxima, other.maxima))

    def finalize(self, sequences: int, *, reward_bound: float | None = None) -> dict[str, float]:
        """The metrics by name, after the last merge. This is the only place that waits for the device.

        Args: `sequences` of the batch these tokens come from (episodes, where one has several); `reward_bound` is xi =
        max |R(y)| (Theorem 3.2), by default the largest |return| seen. Without trainable tokens only `tokens` is
        returned; metrics of what was not given (divergence, entropy, KL to a reference), and of masked tokens where
        none is, are absent.

        Names: tokens; abs_prob_diff_mean and _max (the paper's |pi - mu|); divergence_mean and _max (the
        preset's D); masked_fraction, masked_fraction_positive and _negative (blocked tokens of A > 0 among
        tokens of A > 0, and so on); truncated_fraction (kept tokens with r > C); bad_update_fraction (of all trained
        tokens, masked or not); masked_mu_positive and _negative, masked_entropy_positive and _negative (means over the
        blocked tokens of either sign: Figure 6); ratio_mean, _min, _max and quantiles (of log-spaced bins, so a
        quantile of log r is right within 3 %, or 1e-6); entropy_mean; reference_kl_mean; surrogate, the sample mean of
        Eq. 5; and linear_penalty_estimate, the sample estimate of Eq. 19.
        """
        total = dict(zip(_SUMS, self.sums.tolist(), strict=False))
        top = dict(zip(_MAXIMA, self.maxima.tolist(), strict=True))
        tokens = total["tokens"]
        if tokens == 0:
            return {"tokens": 0.0}
        masked = total["masked_positive"] + total["masked_negative"]
        xi = top["abs_return"] if reward_bound is None else reward_bound
        metrics = {
            "tokens": tokens,
            "abs_prob_diff_mean": total["abs_prob_diff"] / tokens,
            "abs_prob_diff_max": top["abs_prob_diff"],
            "masked_fraction": masked / tokens,
            "masked_fraction_positive": total["masked_positive"] / max(total["positive_tokens"], 1.0),
            "masked_fraction_negative": total["masked_negative"] / max(total["negative_tokens"], 1.0),
            "truncated_fraction": total["truncated"] / tokens,
            "bad_update_fraction": total["bad_updates"] / tokens,
            "ratio_mean": total["ratio"] / tokens,
            "ratio_min": _exp(-top["negative_log_ratio"]),
            "ratio_max": _exp(top["log_ratio"]),
            "surrogate": total["surrogate"] / sequences,
            "linear_penalty_estimate": _linear_penalty(total["abs_ratio_deviation"], xi, sequences),
        }
        if total["divergence_tokens"]:
            metrics["divergence_mean"] = total["divergence"] / total["divergence_tokens"]
            metrics["divergence_max"] = top["divergence"]
        if total["entropy_tokens"]:
            metrics["entropy_mean"] = total["entropy"] / total["entropy_tokens"]
        if total["penalty_tokens"]:
            metrics["reference_kl_mean"] = total["penalty"] / total["penalty_tokens"]
        return metrics | _of_masked(total) | self._ratio_quantiles()

    def mismatch(self) -> dict[str, float]:
        """Figure 2's statistics of these tokens, which say how far trainer and engine are apart where both had the same
        weights: mean_abs_pi_mu and max_abs_pi_mu (the binary TV); ratio percentiles as in `finalize`; and for each of
        `BANDS` of mu that holds tokens abs_log_ratio_BAND and abs_pi_mu_BAND, the means of |log r| and |pi - mu|. Empty
        without trainable tokens. Waits for the device.
        """
        total = dict(zip(_SUMS, self.sums.tolist(), strict=False))
        if not total["tokens"]:
            return {}
        found = {
            "mean_abs_pi_mu": total["abs_prob_diff"] / total["tokens"],
            "max_abs_pi_mu": float(self.maxima[_MAXIMA.index("abs_prob_diff")]),
        }
        for band in BANDS:
            if tokens := total[f"tokens_{band}"]:
                found[f"abs_log_ratio_{band}"] = total[f"abs_log_ratio_{band}"] / tokens
                found[f"abs_pi_mu_{band}"] = total[f"abs_prob_diff_{band}"] / tokens
        return found | self._ratio_quantiles()

    def _ratio_quantiles(self) -> dict[str, float]:
        cumulative = self.sums[len(_SUMS) :].cumsum(0)
        seen = cumulative[-1].item()
        if not seen:
            return {}
        ranks = torch.tensor(QUANTILES, dtype=torch.float64, device=cumulative.device) * seen
        # Rank 0 would fall into the first bin even if it is empty.
        bins = torch.searchsorted(cumulative, ranks.clamp(min=0.5)).tolist()
        return {f"ratio_p{100 * q:g}": _exp(_bin_centre(b)) for q, b in zip(QUANTILES, bins, strict=True)}


def _of_masked(total: dict[str, float]) -> dict[str, float]:
    found = {}
    for sign in ("positive", "negative"):
        if masked := total[f"masked_{sign}"]:
            found[f"masked_mu_{sign}"] = total[f"masked_mu_{sign}"] / masked
            if total["entropy_tokens"]:
                found[f"masked_entropy_{sign}"] = total[f"masked_entropy_{sign}"] / masked
    return found


def token_metrics(
    *,
    pi_logp: Float[Tensor, " T"],
    mu_logp: Float[Tensor, " T"],
    advantages: Float[Tensor, " T"],
    trainable: Bool[Tensor, " T"],
    mask: Bool[Tensor, " T"],
    truncated: Bool[Tensor, " T"],
    divergence: Float[Tensor, " T"] | None,
    entropy: Float[Tensor, " T"] | None,
    returns: Float[Tensor, " T"],
    penalty: Float[Tensor, " T"] | None = None,
) -> TokenMetrics:
    """The metrics of the `trainable` rows of one microbatch. `mask` is M_t, True where the update is kept.

    No gradient, no collective and no wait for the device. Rows outside `trainable` may hold anything.
    """
    log_ratio = torch.where(trainable, pi_logp - mu_logp, 0.0)
    ratio = log_ratio.exp()
    drop = torch.where(trainable, mu_logp.exp() - pi_logp.exp(), 0.0)
    positive, negative = trainable & (advantages > 0), trainable & (advantages < 0)
    blocked = trainable & ~mask
    zero = torch.zeros((), dtype=torch.float64, device=log_ratio.device)

    def total(values: Tensor, rows: Tensor = trainable) -> Tensor:
        return torch.where(rows, values.double(), 0.0).sum()

    def maximum(values: Tensor) -> Tensor:
        # The extra -inf is what an empty batch leaves.
        kept = torch.where(trainable, values.double(), -torch.inf)
        return torch.cat([kept, (zero - torch.inf)[None]]).max()

    count = trainable.double().sum()
    sums = {
        "tokens": count,
        "positive_tokens": positive.double().sum(),
        "negative_tokens": negative.double().sum(),
        "masked_positive": (blocked & positive).double().sum(),
        "masked_negative": (blocked & negative).double().sum(),
        "truncated": truncated.double().sum(),
        "bad_updates": (negative & (drop >= BAD_UPDATE_DROP)).double().sum(),
        "abs_prob_diff": total(drop.abs()),
        "abs_ratio_deviation": total((ratio - 1.0).abs()),
        "ratio": total(ratio),
        # Without a return a token adds nothing, even where its ratio overflowed.
        "surrogate": total(returns * (ratio - 1.0), trainable & (returns != 0)),
        "divergence_tokens": zero if divergence is None else count,
        "divergence": zero if divergence is None else total(divergence),
        "entropy_tokens": zero if entropy is None else count,
        "entropy": zero if entropy is None else total(entropy),
        "penalty_tokens": zero if penalty is None else count,
        "penalty": zero if penalty is None else total(penalty),
    }
    mu = mu_logp.exp()
    for sign, rows in (("positive", blocked & positive), ("negative", blocked & negative)):
        sums[f"masked_mu_{sign}"] = total(mu, rows)
        sums[f"masked_entropy_{sign}"] = zero if entropy is None else total(entropy, rows)
    for band, (low, high) in BANDS.items():
        inside = trainable & (mu >= low) & (mu < high)
        sums[f"tokens_{band}"] = inside.double().sum()
        sums[f"abs_log_ratio_{band}"] = total(log_ratio.abs(), inside)
        sums[f"abs_prob_diff_{band}"] = total(drop.abs(), inside)
    maxima = {
        "abs_prob_diff": maximum(drop.abs()),
        "divergence": zero - torch.inf if divergence is None else maximum(divergence),
        "log_ratio": maximum(log_ratio),
        "negative_log_ratio": maximum(-log_ratio),
        "abs_return": maximum(returns.abs()),
    }
    histogram = torch.zeros(_BINS, dtype=torch.float64, device=log_ratio.device)
    # A NaN ratio has no place in a histogram; it shows in ratio_mean.
    counted = trainable & ~log_ratio.isnan()
    histogram.index_add_(0, _bin_of(torch.where(counted, log_ratio, 0.0)), counted.double())
    return TokenMetrics(
        torch.cat([torch.stack([sums[name] for name in _SUMS]), histogram]),
        torch.stack([maxima[name] for name in _MAXIMA]),
    )


def masked_token_counts(
    token_ids: Int[Tensor, " T"],
    advantages: Float[Tensor, " T"],
    loss_mask: Bool[Tensor, " T"],
    mask: Bool[Tensor, " T"],
    vocab_size: int,
) -> Int[Tensor, "2 V"]:
    """How often each token id was blocked, int64 [2, V]: row 0 for A > 0, row 1 for A < 0 (Appendix E's table).

    `mask` is `PolicyLoss.mask`. Counts of microbatches and ranks add up, exactly. Rows outside the loss mask may hold
    any id. Does not wait for the device.
    """
    counts = torch.zeros(2, vocab_size, dtype=torch.int64, device=token_ids.device)
    trainable = loss_mask != 0
    ids = torch.where(trainable, token_ids, 0).long()
    blocked = trainable & ~mask
    counts[0].index_add_(0, ids, (blocked & (advantages > 0)).long())
    counts[1].index_add_(0, ids, (blocked & (advantages < 0)).long())
    return counts


def most_masked_tokens(counts: Int[Tensor, "2 V"], limit: int = 50) -> dict[str, list[tuple[int, int]]]:
    """The (token id, count) pairs masked most, `positive` and `negative` samples apart, most frequent first.

    Ties go to the smaller id; ids never masked are left out, so a list may be shorter than `limit`.
    """
    result = {}
    for name, row in zip(("positive", "negative"), counts.cpu(), strict=True):
        order = torch.sort(row, descending=True, stable=True).indices[:limit]
        result[name] = [(int(i), int(row[i])) for i in order if row[i] > 0]
    return result


def _linear_penalty(abs_ratio_deviation: float, xi: float, sequences: int) -> float:
    """2 xi (1/N) sum over N sequences and their tokens of |r_t - 1|: the sample estimate of Eq. 19, an estimate.

    Unbiased for the linear penalty 4 xi E_mu[sum_t D_TV] (Eq. 20) if the sequences were drawn from mu and pi was not
    fitted to them, because E_{a ~ mu}|r - 1| = 2 D_TV. The full divergence is not known in training (binary and top-K
    are lower bounds, so nothing built on them bounds anything from below), and Eq. 7's T(T - 1) is vacuous at T = 16k.
    """
    return 2.0 * xi * abs_ratio_deviation / sequences if abs_ratio_deviation else 0.0


def _exp(log_value: float) -> float:
    return math.inf if log_value >= 709.0 else math.exp(log_value)  # NaN stays


def _bin_of(log_ratio: Tensor) -> Tensor:
    """Index of the histogram bin, 0 for the most negative log r."""
    scale = _BINS_PER_SIDE / math.log(_LARGEST / _SMALLEST)
    magnitude = log_ratio.abs().clamp(_SMALLEST, _LARGEST)
    step = ((magnitude / _SMALLEST).log() * scale).floor().long().clamp(max=_BINS_PER_SIDE - 1) + 1
    step = torch.where(log_ratio.abs() < _SMALLEST, 0, step)
    return _BINS_PER_SIDE + torch.where(log_ratio < 0, -step, step)


def _bin_centre(index: int) -> float:
    """Geometric middle of the bin, as log r."""
    step = index - _BINS_PER_SIDE
    if step == 0:
        return 0.0
    width = math.log(_LARGEST / _SMALLEST) / _BINS_PER_SIDE
    return math.copysign(_SMALLEST * math.exp((abs(step) - 0.5) * width), step)
