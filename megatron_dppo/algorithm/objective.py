"""Eq. 23, once, for every preset: grad L = M_t min(r_t, C) A_t grad log pi(y_t | s_t)."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from megatron_dppo.algorithm import trust_region as tr
from megatron_dppo.algorithm.divergence import DivergenceInputs
from megatron_dppo.algorithm.metrics import TokenMetrics, token_metrics
from megatron_dppo.algorithm.own_loss import LossInputs, own_loss
from megatron_dppo.algorithm.preset import Anchor, Preset, RatioLevel, TrustRegion
from megatron_dppo.algorithm.sequence_ratio import SequenceReduce, sequence_log_ratio


@dataclass(frozen=True)
class PolicyLoss:
    """What `policy_loss` returns for the T rows of a microbatch."""

    per_token: Float[Tensor, " T"]
    """Loss of each row, to be minimised after `aggregation.aggregate`; exactly 0 on rows outside the loss mask."""
    mask: Bool[Tensor, " T"]
    """M_t: rows whose update is kept. False on blocked rows and on rows outside the loss mask."""
    ratio: Float[Tensor, " T"]
    """r_t before truncation at C, float64, without gradient; 1 outside the loss mask."""
    metrics: TokenMetrics
    """Sums, maxima and a histogram over these rows, to be merged over microbatches and ranks."""


def divergence_for(
    preset: Preset,
    *,
    logp: Float[Tensor, " T"],
    mu_logp: Float[Tensor, " T"],
    recomputed_logp: Float[Tensor, " T"] | None = None,
    topk_logp: Float[Tensor, "T K1"] | None = None,
    mu_topk_logp: Float[Tensor, "T K1"] | None = None,
    recomputed_topk_logp: Float[Tensor, "T K1"] | None = None,
    topk_member: Bool[Tensor, "T K1"] | None = None,
) -> Float[Tensor, " T"] | None:
    """D(anchor || pi) of each row by the preset's approximation (Eqs. 13-16); None if the preset has none.

    Args: log-probabilities of the sampled token [T] under the trained, the rollout and the recomputed policy, and
    the same three for the [T, K+1] ids of the *rollout's* top-K set (module `divergence`), whichever the preset
    needs; those it does not need are ignored. Returns float64 [T] without gradient. Raises ValueError naming
    the argument that is missing. Rows outside the loss mask may yield anything; `policy_loss` never reads them.
    """
    row = preset.divergence_row
    if row is None:
        return None
    recomputed = preset.anchor is Anchor.RECOMPUTED
    anchor = _needed(preset, recomputed_logp, "recomputed_logp") if recomputed else mu_logp
    if not preset.needs_topk:
        return row(DivergenceInputs(anchor_logp=anchor.detach(), logp=logp.detach()))

    name = "recomputed_topk_logp" if recomputed else "mu_topk_logp"
    anchor_topk = _needed(preset, recomputed_topk_logp if recomputed else mu_topk_logp, name)
    current = _needed(preset, topk_logp, "topk_logp")
    member = _needed(preset, topk_member, "topk_member")
    if current.shape[-1] != (preset.topk or 0) + 1:
        raise ValueError(
            f"preset {preset.name!r} has topk={preset.topk}, so top-K tensors need {(preset.topk or 0) + 1} columns "
            f"(K and one for the sampled token), not {current.shape[-1]}"
        )
    return row(
        DivergenceInputs(
            anchor_logp=anchor.detach(),
            logp=logp.detach(),
            anchor_topk_logp=anchor_topk.detach(),
            topk_logp=current.detach(),
            member=member,
            include_other=preset.include_other,
        )
    )


def policy_loss(
    preset: Preset,
    logp: Float[Tensor, " T"],
    mu_logp: Float[Tensor, " T"],
    advantages: Float[Tensor, " T"],
    *,
    loss_mask: Bool[Tensor, " T"],
    divergence: Float[Tensor, " T"] | None = None,
    recomputed_logp: Float[Tensor, " T"] | None = None,
    entropy: Float[Tensor, " T"] | None = None,
    sequence_ids: Int[Tensor, " T"] | None = None,
    num_sequences: int | None = None,
    sequence_reduce: SequenceReduce | None = None,
    returns: Float[Tensor, " T"] | None = None,
    penalty: Float[Tensor, " T"] | None = None,
    penalty_coefficient: float = 0.0,
) -> PolicyLoss:
    """Per-token loss -M_t min(r_t, C) A_t, with gradient -M_t min(r_t, C) A_t grad log pi (Eq. 23).

    Mask, ratio and cap carry no gradient. The value is the surrogate itself (Eq. 11), not the score function, so
    losses compare across presets. Rows that are blocked or outside the loss mask contribute exactly 0 to value
    and gradient, whatever they hold (inf, NaN), by selection and never by multiplication. An active row whose ratio
    is NaN or overflows stays visible as a non-finite loss.

    Args:
        logp: log pi(y_t | s_t) of the sampled token, with gradient.
        mu_logp: the same under the distribution that drew it.
        advantages: A_t.
        loss_mask: rows that are trained; anything non-zero counts.
        divergence: D of `divergence_for`; needed by divergence presets, refused by the others.
        recomputed_logp: log pi'(y_t | s_t); needed where `preset.needs_recomputed_logp`, refused elsewhere.
        entropy: of the trained policy; needed (with gradient) where the preset has an entropy bonus, and otherwise
            only a metric. The bonus -coefficient * entropy is added on every trained row, blocked or not.
        sequence_ids, num_sequences, sequence_reduce: for sequence-level ratios only, see `sequence_log_ratio`.
        returns: R(y) of each row's sequence for the bound metrics (Section 3); the advantages if None.
        penalty: with gradient, an estimate of the KL to a reference (`reference_kl`), added `penalty_coefficient` times
            on every trained row, blocked or not; with a coefficient of 0 a metric and nothing else.

    No collective but `sequence_reduce`, the caller's own. Raises ValueError on shapes that differ and on inputs that
    the preset needs and lacks, or gets and has no use for.
    """
    _check_shapes(
        logp,
        mu_logp=mu_logp,
        advantages=advantages,
        loss_mask=loss_mask,
        divergence=divergence,
        recomputed_logp=recomputed_logp,
        entropy=entropy,
        sequence_ids=sequence_ids,
        returns=returns,
        penalty=penalty,
    )
    _check_inputs(preset, divergence, recomputed_logp, entropy, sequence_ids)
    trainable = loss_mask != 0

    def clean(values: Tensor) -> Tensor:
        """float64 without gradient; neutral 0 on excluded rows, so that garbage there reaches nothing below."""
        return torch.where(trainable, values.detach().double(), 0.0)

    # The policies that ratios may be of.
    pi, mu, advantage = clean(logp), clean(mu_logp), clean(advantages)
    policies = {Anchor.ROLLOUT: mu}
    if recomputed_logp is not None:
        policies[Anchor.RECOMPUTED] = clean(recomputed_logp)

    def ratio_of(policy: Tensor, reference: Anchor, level: RatioLevel) -> Tensor:
        log_ratio = policy - policies[reference]
        if level is not RatioLevel.TOKEN:
            assert sequence_ids is not None
            mean = level is RatioLevel.SEQUENCE
            log_ratio = sequence_log_ratio(
                log_ratio, trainable, sequence_ids, mean=mean, num_sequences=num_sequences, reduce=sequence_reduce
            )
        return log_ratio.exp()

    # Which tokens are trained: trust region, then band.
    ratio = ratio_of(pi, preset.ratio_reference, preset.ratio_level)
    distance = None if divergence is None else clean(divergence)
    keep = torch.ones_like(trainable)
    if preset.anchor is not None:
        same = preset.anchor is preset.ratio_reference
        anchor_ratio = ratio if same else ratio_of(pi, preset.anchor, preset.ratio_level)
        keep = _keep(preset, anchor_ratio, policies[preset.anchor].exp(), pi.exp(), advantage, distance)
    if preset.has_band:
        policy = policies[Anchor.RECOMPUTED] if preset.band_recomputed else pi
        band = ratio_of(policy, Anchor.ROLLOUT, preset.band_level)
        keep &= tr.ratio_band_mask(band, low=preset.band_low, high=preset.band_high)
    mask = trainable & keep

    # Their loss.
    if preset.loss is None:
        per_token = _surrogate(logp, ratio.clamp(max=preset.ratio_cap), advantage, mask)
    else:
        per_token, mask = own_loss(
            preset,
            LossInputs(
                logp=torch.where(trainable, logp, 0.0),
                entropy=None if entropy is None else torch.where(trainable, entropy, 0.0),
                mu_logp=mu,
                recomputed_logp=policies.get(Anchor.RECOMPUTED),
                advantages=advantage,
                ratio=ratio,
                divergence=distance,
                mask=mask,
                loss_mask=trainable,
                sequence_ids=sequence_ids,
                preset=preset,
            ),
        )
        per_token = per_token.to(_loss_dtype(logp))
    if distance is not None:  # of a divergence of one's own: as visible as a loss that is not finite
        per_token = torch.where(trainable & distance.isnan(), torch.nan, per_token)
    if preset.entropy_coefficient:
        assert entropy is not None
        per_token = per_token - preset.entropy_coefficient * torch.where(trainable, entropy, 0.0)
    if penalty is not None and penalty_coefficient:
        per_token = per_token + (penalty_coefficient * torch.where(trainable, penalty, 0.0)).to(per_token.dtype)

    metrics = token_metrics(
        pi_logp=pi,
        mu_logp=mu,
        advantages=advantage,
        trainable=trainable,
        mask=mask,
        truncated=mask & (ratio > preset.ratio_cap),
        divergence=distance,
        entropy=None if entropy is None else clean(entropy),
        returns=advantage if returns is None else clean(returns),
        penalty=None if penalty is None else clean(penalty),
    )
    return PolicyLoss(per_token=per_token, mask=mask, ratio=ratio, metrics=metrics)


def _surrogate(logp: Tensor, weight: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    """-M min(r, C) A of Eq. 23, with the gradient of log pi."""
    # A zero advantage or ratio makes the update 0 even where the other factor, or log pi, is infinite.
    active = mask & (advantage != 0) & (weight != 0)
    weight = torch.where(active, weight * advantage, 0.0).to(_loss_dtype(logp))
    logp = torch.where(active, logp, 0.0).to(weight.dtype)
    # 1 + log pi - sg(log pi) has the value 1 and the gradient of log pi.
    return torch.where(active, -weight * (1.0 + logp - logp.detach()), 0.0)


def _keep(
    preset: Preset, ratio: Tensor, anchor_prob: Tensor, pi_prob: Tensor, advantages: Tensor, divergence: Tensor | None
) -> Tensor:
    """The preset's mask M_t, from quantities measured against its anchor."""
    low, high = preset.threshold_negative, preset.threshold_positive
    assert low is not None
    if preset.trust_region is TrustRegion.NEGATIVE_DROP:
        return tr.negative_drop_mask(anchor_prob, pi_prob, advantages, delta=low)
    assert high is not None
    if preset.trust_region is TrustRegion.RATIO_CLIP:
        return tr.ratio_clip_mask(ratio, advantages, clip_low=low, clip_high=high, dual_clip=preset.dual_clip)
    if preset.trust_region is TrustRegion.DIVERGENCE:
        assert divergence is not None
        return tr.divergence_mask(ratio, divergence, advantages, delta_negative=low, delta_positive=high)
    assert preset.trust_region is TrustRegion.RELAXED_CLIP, f"{preset.trust_region} has no branch here"
    assert preset.relax_below is not None
    return tr.relaxed_clip_mask(
        ratio,
        advantages,
        anchor_prob,
        clip_low=low,
        clip_high=high,
        relax_below=preset.relax_below,
        relax_low=preset.relax_low,
        relax_high=preset.relax_high,
    )


def _loss_dtype(logp: Tensor) -> torch.dtype:
    """float64 stays, anything narrower is computed in float32."""
    return logp.dtype if logp.dtype == torch.float64 else torch.float32


def _needed(preset: Preset, value: Tensor | None, name: str) -> Tensor:
    if value is None:
        raise ValueError(
            f"preset {preset.name!r} (divergence {preset.divergence}, anchor {preset.anchor}) needs {name}"
        )
    return value


def _check_shapes(logp: Tensor, **others: Tensor | None) -> None:
    if logp.ndim != 1:
        raise ValueError(f"logp must be flat, one row per token: {tuple(logp.shape)}")
    for name, value in others.items():
        if value is not None and value.shape != logp.shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, logp {tuple(logp.shape)}: rows must match")


def _check_inputs(
    preset: Preset,
    divergence: Tensor | None,
    recomputed_logp: Tensor | None,
    entropy: Tensor | None,
    sequence_ids: Tensor | None,
) -> None:
    who = f"preset {preset.name!r}"
    if preset.needs_recomputed_logp and recomputed_logp is None:
        raise ValueError(
            f"{who} compares with the recomputed policy, but recomputed_logp is missing: run the trainer's forward "
            f"pass before the update, or use an anchor and ratio_reference of 'rollout'"
        )
    if recomputed_logp is not None and not preset.needs_recomputed_logp:
        raise ValueError(f"{who} compares with the rollout policy only; recomputed_logp would have no effect")
    if preset.trust_region is TrustRegion.DIVERGENCE and divergence is None:
        raise ValueError(f"{who} masks by {preset.divergence}, but divergence is missing: see divergence_for")
    if divergence is not None and preset.trust_region is not TrustRegion.DIVERGENCE:
        raise ValueError(f"{who} does not mask by divergence (trust region {preset.trust_region}); pass None")
    if preset.entropy_coefficient and entropy is None:
        raise ValueError(f"{who} has entropy_coefficient={preset.entropy_coefficient}, but entropy is missing")
    if preset.needs_sequences and sequence_ids is None:
        raise ValueError(f"{who} uses sequence-level ratios, but sequence_ids is missing")
