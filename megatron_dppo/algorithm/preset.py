"""What an algorithm of the paper is, as data: the fields that tell the rows of the preset table apart.

Under Eq. 23 every algorithm has the gradient M_t min(r_t, C) A_t grad log pi; a `Preset` says how M_t is decided,
against which policy, and what r_t and C are. Nothing else in the package branches on an algorithm's name.
"""

import math
from dataclasses import dataclass, fields
from enum import StrEnum

from megatron_dppo.algorithm.aggregation import Aggregation
from megatron_dppo.algorithm.divergence import DIVERGENCES, Divergence, Needs, find_divergence
from megatron_dppo.launch.imports import load_callable


class PresetError(ValueError):
    """A preset that does not exist or whose settings contradict each other."""


class TrustRegion(StrEnum):
    """Which rule of `trust_region` decides the mask."""

    NONE = "none"
    RATIO_CLIP = "ratio-clip"
    RELAXED_CLIP = "relaxed-clip"
    DIVERGENCE = "divergence"
    NEGATIVE_DROP = "negative-drop"


class Anchor(StrEnum):
    """A policy that the trained one is compared with."""

    ROLLOUT = "rollout"
    """mu: the log-probabilities of the engine that drew the tokens."""
    RECOMPUTED = "recomputed"
    """pi': the trainer's own log-probabilities before the update; costs one more forward pass (Section 5.2)."""


class RatioLevel(StrEnum):
    """Whether a ratio is a token's own or one of its whole sequence."""

    TOKEN = "token"
    SEQUENCE = "sequence"
    """The geometric mean over the sequence's trained tokens, as in GSPO."""
    PRODUCT = "sequence-product"
    """The product over them: the importance ratio of the whole response."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One algorithm. Strings are accepted for the enums. Contradictory settings raise PresetError with the reason."""

    name: str
    """Row of the table this came from; a label, nothing depends on it."""
    constants: str
    """Where the constants are published: `appendix-d`, `appendix-f`, ..."""
    trust_region: TrustRegion
    anchor: Anchor | None = None
    """Policy that M_t is decided against; None only where there is no trust region."""
    divergence: str | None = None
    """D of the divergence trust region: a row of `DIVERGENCES`, or the import path of one's own."""
    threshold_negative: float | None = None
    """For A < 0: epsilon_low of a clip, delta of a divergence or of the minimal mask."""
    threshold_positive: float | None = None
    """For A > 0: epsilon_high of a clip, delta of a divergence."""
    relax_below: float | None = None
    """alpha of the relaxed clip: it is lifted where the anchor's probability is below."""
    relax_low: bool = False
    relax_high: bool = False
    dual_clip: float | None = None
    """c of the ratio clip: for A < 0 it also blocks r > c (dual clip, arXiv 1912.09729)."""
    band_low: float | None = None
    """Rows whose ratio to mu is below are dropped, whatever their advantage."""
    band_high: float | None = None
    """Rows whose ratio to mu is above are dropped."""
    band_level: RatioLevel = RatioLevel.TOKEN
    """Of which ratio the band is."""
    band_recomputed: bool = False
    """The band is of pi'/mu, the mismatch of one set of weights; of pi/mu otherwise."""
    topk: int | None = None
    """K of the top-K divergences; the engine must return as many."""
    include_other: bool = True
    """Whether top-K TV counts the "other" bucket; False is Eq. 15 to the letter."""
    ratio_cap: float = math.inf
    """C of Eq. 23."""
    ratio_reference: Anchor = Anchor.ROLLOUT
    """Denominator of r_t in Eq. 23, the importance ratio of the gradient."""
    ratio_level: RatioLevel = RatioLevel.TOKEN
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus; the paper uses none."""
    aggregation: Aggregation = Aggregation.SEQ_MEAN_TOKEN_SUM_NORM
    """How token losses combine, unless the run says otherwise."""
    loss: str | None = None
    """Import path of a per-token loss of one's own (`own_loss`) in place of Eq. 23's; the mask stays the preset's."""

    @property
    def needs_recomputed_logp(self) -> bool:
        """Whether the trainer must run its forward pass once more before the update."""
        return self.band_recomputed or Anchor.RECOMPUTED in (self.anchor, self.ratio_reference)

    @property
    def has_band(self) -> bool:
        """Whether rows are dropped by their ratio to mu alone."""
        return self.band_low is not None or self.band_high is not None

    @property
    def needs_sequences(self) -> bool:
        """Whether a ratio is of whole sequences, which no split but context parallelism may divide."""
        return not self.ratio_level is self.band_level is RatioLevel.TOKEN

    @property
    def divergence_row(self) -> Divergence | None:
        """What `divergence` names."""
        return None if self.divergence is None else find_divergence(self.divergence)

    @property
    def needs_topk(self) -> bool:
        """Whether top-K log-probabilities of rollout and trainer are needed."""
        return self.divergence_row is not None and self.divergence_row.needs is not Needs.SAMPLED

    @property
    def needs_vocabulary(self) -> bool:
        """Whether K must be the size of the vocabulary."""
        return self.divergence_row is not None and self.divergence_row.needs is Needs.VOCABULARY

    def __post_init__(self) -> None:
        self._coerce("trust_region", TrustRegion)
        self._coerce("anchor", Anchor)
        self._check_names()
        self._coerce("ratio_reference", Anchor)
        self._coerce("ratio_level", RatioLevel)
        self._coerce("band_level", RatioLevel)
        self._coerce("aggregation", Aggregation)
        thresholds = ("threshold_negative", "threshold_positive", "relax_below", "dual_clip", "band_low", "band_high")
        for name in (*thresholds, "ratio_cap", "entropy_coefficient"):
            self._coerce_number(name)
        for name in ("relax_low", "relax_high", "include_other", "band_recomputed"):
            if not isinstance(getattr(self, name), bool):
                raise self._error(f"{name}={getattr(self, name)!r} must be true or false")
        self._check_trust_region()
        self._check_divergence()
        self._check_relaxation()
        self._check_ratio()
        self._check_band()

    def _check_names(self) -> None:
        """Of the divergence and the loss. What a path names is loaded here: a wrong one is refused at once."""
        for name in ("divergence", "loss"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise self._error(f"{name}={value!r} must be a name")
        if self.loss is not None:
            if ":" not in self.loss:
                raise self._error(f"loss={self.loss!r} must be an import path package.module:function")
            load_callable(self.loss, named="algorithm.loss=")
        if self.divergence is not None:
            try:
                find_divergence(self.divergence)
            except ValueError as error:
                raise self._error(str(error)) from None

    def _coerce(self, name: str, kind: type[StrEnum]) -> None:
        value = getattr(self, name)
        optional = name == "anchor"
        if value is None and optional:
            return
        try:
            object.__setattr__(self, name, kind(value))
        except ValueError:
            choices = ", ".join([*kind, *(["null"] if optional else [])])
            raise self._error(f"{name}={value!r} is not one of {choices}") from None

    def _coerce_number(self, name: str) -> None:
        value = getattr(self, name)
        if value is None and name not in ("ratio_cap", "entropy_coefficient"):
            return
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if math.isnan(number) or number < 0:
            raise self._error(f"{name}={value!r} must be a number, 0 or more")
        object.__setattr__(self, name, number)

    def _error(self, reason: str) -> PresetError:
        return PresetError(f"preset {self.name!r}: {reason}")

    def _refuse_unused(self, reason: str, *names: str) -> None:
        """A setting without effect is a misunderstanding: refuse it rather than ignore it."""
        defaults = {f.name: f.default for f in fields(self)}
        for name in names:
            if getattr(self, name) != defaults[name]:
                raise self._error(
                    f"{name}={getattr(self, name)} has no effect, because {reason}: set it to {defaults[name]}"
                )

    def _check_trust_region(self) -> None:
        if self.trust_region is TrustRegion.NONE:
            self._refuse_unused("there is no trust region", "anchor", "threshold_negative", "threshold_positive")
            return
        if self.anchor is None:
            raise self._error("a trust region needs an anchor: rollout or recomputed")
        if self.threshold_negative is None:
            raise self._error("a trust region needs threshold_negative")
        if self.trust_region is TrustRegion.NEGATIVE_DROP:
            self._refuse_unused("the minimal mask only blocks negative advantages", "threshold_positive")
        elif self.threshold_positive is None:
            raise self._error(f"the trust region {self.trust_region} needs threshold_positive")

    def _check_divergence(self) -> None:
        if self.trust_region is TrustRegion.DIVERGENCE:
            if self.divergence is None:
                raise self._error(f"a divergence trust region needs divergence: one of {', '.join(DIVERGENCES)}")
        else:
            self._refuse_unused(f"the trust region is {self.trust_region}", "divergence")
        if self.needs_topk:
            if not isinstance(self.topk, int) or isinstance(self.topk, bool) or self.topk < 1:
                raise self._error(
                    f"divergence {self.divergence} needs topk >= 1, the K the engine returns: {self.topk}"
                )
        else:
            self._refuse_unused("the divergence is not a top-K one", "topk")
        if self.divergence_row is None or not self.divergence_row.can_leave_other_out:
            self._refuse_unused(
                "only top-K TV can leave the 'other' bucket out (Eq. 16 always counts it)", "include_other"
            )

    def _check_relaxation(self) -> None:
        if self.trust_region is not TrustRegion.RELAXED_CLIP:
            self._refuse_unused("the clip is not a relaxed one", "relax_below", "relax_low", "relax_high")
            return
        if self.relax_below is None:
            raise self._error("a relaxed clip needs relax_below, the alpha of Section 6")
        if not (self.relax_low or self.relax_high):
            raise self._error("a relaxed clip must relax at least one end: relax_low, relax_high or both")

    def _check_band(self) -> None:
        if not self.has_band:
            self._refuse_unused("there is no band: band_low and band_high are not set", "band_level", "band_recomputed")
        elif (self.band_low or 0.0) > (math.inf if self.band_high is None else self.band_high):
            raise self._error(f"band_low={self.band_low} is above band_high={self.band_high}: nothing would be kept")
        if self.trust_region is not TrustRegion.RATIO_CLIP:
            self._refuse_unused("the trust region is not a ratio clip", "dual_clip")
        elif self.dual_clip is not None and self.dual_clip <= 1:
            raise self._error(f"dual_clip={self.dual_clip:g} must exceed 1, or it blocks what has not moved")

    def _check_ratio(self) -> None:
        if self.ratio_cap == 0:
            raise self._error("ratio_cap=0 would remove every gradient")
        if self.ratio_level is RatioLevel.SEQUENCE and self.trust_region not in (
            TrustRegion.NONE,
            TrustRegion.RATIO_CLIP,
        ):
            raise self._error(
                f"ratio_level=sequence contradicts the trust region {self.trust_region}, which masks single tokens"
            )
        if self.ratio_level is RatioLevel.PRODUCT and self.trust_region is not TrustRegion.NONE:
            raise self._error(
                f"ratio_level=sequence-product contradicts the trust region {self.trust_region}: the ratio of a whole "
                "response is cut at ratio_cap or dropped by a band; set trust_region to none"
            )
