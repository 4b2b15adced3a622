"""The preset table: every algorithm of Appendices D and F, and those that people compare them with.

A row has one set of constants per place that publishes some; the first set of a row is its default. The table in
docs/algorithms.md lists all of them and is tested against this file.
"""

import dataclasses
import math
from typing import Any

from megatron_dppo.algorithm.aggregation import Aggregation
from megatron_dppo.algorithm.divergence import DIVERGENCES, Divergence, Needs, find_divergence
from megatron_dppo.algorithm.preset import Anchor, Preset, PresetError, RatioLevel, TrustRegion
from megatron_dppo.errors import did_you_mean

APPENDIX_D = "appendix-d"
"""Stability analysis (Section 5): no truncation of the ratio except where TIS is in the name."""
APPENDIX_F = "appendix-f"
"""Scaling experiments (Section 7): C = 5 throughout; the top-K rows are Appendix G.2's, in the same setting."""
APPENDIX_F_LORA = "appendix-f-lora"
"""Scaling experiment with LoRA: Appendix F with delta = 0.15 for TV."""
ROLLOUT_CORRECTION = "verl-rollout-corr"
"""Rejection and truncation by the ratio to mu (Liu, Li et al., "When Speed Kills Stability", 2025), with thresholds of
verl's docs/algo/rollout_corr_math.md, Sections 3.2 to 3.4, without its recomputed policy (there: bypass mode)."""
SECTION_5_3 = "section-5.3"
SECTION_6 = "section-6"

TOPK = 20
"""K of Appendix G.2, the most that vLLM returns unless told otherwise."""


def _unmasked(name: str, constants: str, cap: float, **fields: Any) -> Preset:
    return Preset(name=name, constants=constants, trust_region=TrustRegion.NONE, ratio_cap=cap, **fields)


def _clip(
    name: str,
    constants: str,
    low: float,
    high: float,
    *,
    trust_region: TrustRegion = TrustRegion.RATIO_CLIP,
    anchor: Anchor = Anchor.ROLLOUT,
    **fields: Any,
) -> Preset:
    return Preset(
        name=name,
        constants=constants,
        trust_region=trust_region,
        anchor=anchor,
        threshold_negative=low,
        threshold_positive=high,
        **fields,
    )


def _dppo(
    name: str,
    constants: str,
    divergence: str,
    delta: float,
    *,
    anchor: Anchor = Anchor.ROLLOUT,
    cap: float = math.inf,
) -> Preset:
    return Preset(
        name=name,
        constants=constants,
        trust_region=TrustRegion.DIVERGENCE,
        anchor=anchor,
        divergence=divergence,
        threshold_negative=delta,
        threshold_positive=delta,
        topk=_default_topk(DIVERGENCES[divergence]),
        ratio_cap=cap,
    )


def _mask(name: str, delta: float, anchor: Anchor = Anchor.ROLLOUT) -> Preset:
    return Preset(
        name=name,
        constants=SECTION_5_3,
        trust_region=TrustRegion.NEGATIVE_DROP,
        anchor=anchor,
        threshold_negative=delta,
    )


def _relaxed(name: str, *, low: bool, high: bool) -> Preset:
    return _clip(
        name,
        SECTION_6,
        0.2,
        0.28,
        trust_region=TrustRegion.RELAXED_CLIP,
        relax_below=0.1,
        relax_low=low,
        relax_high=high,
    )


def _default_topk(divergence: Divergence) -> int | None:
    """K where nobody says another; None too where it must be the size of a vocabulary."""
    return TOPK if divergence.needs is Needs.TOPK else None


_CAPS = {APPENDIX_F: 5.0, APPENDIX_F_LORA: 5.0}
"""C by set of constants, where it is not infinite."""


def _dppo_rows(name: str, row: Divergence) -> list[Preset]:
    """One preset for each of its thresholds, and Figure 4's ablation with Appendix D's."""
    rows = [_dppo(f"dppo-{name}", at, name, delta, cap=_CAPS.get(at, math.inf)) for at, delta in row.thresholds.items()]
    if (delta := row.thresholds.get(APPENDIX_D)) is not None:
        rows.append(_dppo(f"dppo-{name}-decoupled", APPENDIX_D, name, delta, anchor=Anchor.RECOMPUTED))
    return rows


_ROWS: list[Preset] = [
    *(preset for name, row in DIVERGENCES.items() for preset in _dppo_rows(name, row)),
    _clip("grpo-clip-higher", APPENDIX_F, 0.2, 0.27, ratio_cap=5.0),
    _clip("grpo-clip-higher", APPENDIX_F_LORA, 0.2, 0.27, ratio_cap=5.0),
    _clip("grpo-clip-higher", APPENDIX_D, 0.2, 0.28),
    _unmasked("cispo", APPENDIX_F, 5.0),
    _unmasked("cispo", APPENDIX_F_LORA, 5.0),
    _unmasked("cispo", APPENDIX_D, 3.0),
    _unmasked("pg-is", APPENDIX_D, math.inf),
    _clip("minirl", APPENDIX_D, 0.2, 0.28, anchor=Anchor.RECOMPUTED),
    _clip("minirl-tis", APPENDIX_D, 0.2, 0.28, anchor=Anchor.RECOMPUTED, ratio_cap=3.0),
    _mask("mask-0.5", 0.5),
    _mask("mask-0.8", 0.8),
    _mask("mask-0.5-recompute", 0.5, Anchor.RECOMPUTED),
    _relaxed("relax-low", low=True, high=False),
    _relaxed("relax-high", low=False, high=True),
    _relaxed("relax-both", low=True, high=True),
    _clip("ppo-clip", "section-4.2", 0.2, 0.2),
    _clip(
        "gspo",
        "arxiv-2507.18071",
        3e-4,
        4e-4,
        ratio_level=RatioLevel.SEQUENCE,
        aggregation=Aggregation.SEQ_MEAN_TOKEN_MEAN,
    ),
    _clip("ppo-dual-clip", "arxiv-1912.09729", 0.2, 0.2, dual_clip=3.0),
    _unmasked("token-mis", ROLLOUT_CORRECTION, math.inf, band_high=2.0),
    _unmasked("sequence-tis", ROLLOUT_CORRECTION, 2.0, ratio_level=RatioLevel.PRODUCT),
    _unmasked(
        "sequence-mis",
        ROLLOUT_CORRECTION,
        math.inf,
        ratio_level=RatioLevel.PRODUCT,
        band_high=2.0,
        band_level=RatioLevel.PRODUCT,
    ),
    _unmasked(
        "geometric-mis", ROLLOUT_CORRECTION, 2.0, band_low=1 / 1.001, band_high=1.001, band_level=RatioLevel.SEQUENCE
    ),
    _unmasked("icepop", "arxiv-2512.16144", math.inf, band_low=0.5, band_high=5.0, aggregation=Aggregation.TOKEN_MEAN),
    _clip(
        "icepop-decoupled",
        "arxiv-2510.18855",
        0.2,
        0.28,
        anchor=Anchor.RECOMPUTED,
        band_low=0.5,
        band_high=5.0,
        band_recomputed=True,
        aggregation=Aggregation.SEQ_MEAN_TOKEN_MEAN,
    ),
]

_TABLE: dict[str, dict[str, Preset]] = {}
for _row in _ROWS:
    _TABLE.setdefault(_row.name, {})[_row.constants] = _row


def names() -> list[str]:
    """Names of all presets, in the order of the table."""
    return list(_TABLE)


def constant_sets(name: str) -> list[str]:
    """Sets of constants published for this preset; the first is the default. Raises PresetError if unknown."""
    return list(_lookup(name))


def get(name: str, *, constants: str | None = None, **overrides: Any) -> Preset:
    """The preset `name` with one published set of constants, and any field overridden.

    Args: `constants` is one of `constant_sets(name)`, the first if None. `overrides` are fields of `Preset`. Another
    divergence comes with its own thresholds and K, where these are not among the overrides.
    Raises PresetError for an unknown name, set or field (with the nearest match), and for settings that contradict.
    """
    row = _lookup(name)
    chosen = constants if constants is not None else next(iter(row))
    if chosen not in row:
        raise PresetError(f"preset {name!r} has no constants {chosen!r}; it has: {', '.join(row)}")
    known = [f.name for f in dataclasses.fields(Preset) if f.name not in ("name", "constants")]
    for field in overrides:
        if field not in known:
            hint = did_you_mean(field, known, most=2)
            raise PresetError(f"preset {name!r} has no field {field!r}{hint}; fields: {', '.join(known)}")
    return dataclasses.replace(row[chosen], **_of_another_divergence(row[chosen], overrides), **overrides)


def _of_another_divergence(preset: Preset, overrides: dict[str, Any]) -> dict[str, Any]:
    """The thresholds and K that belong to the divergence among `overrides`. Raises PresetError where it has none."""
    name = overrides.get("divergence", preset.divergence)
    if name == preset.divergence or not isinstance(name, str) or preset.trust_region is not TrustRegion.DIVERGENCE:
        return {}
    try:
        row = find_divergence(name)
    except ValueError as error:
        raise PresetError(f"preset {preset.name!r}: {error}") from None
    delta = row.thresholds.get(preset.constants, next(iter(row.thresholds.values()), None))
    thresholds = ("threshold_negative", "threshold_positive")
    if delta is None and not overrides.keys() >= set(thresholds):
        raise PresetError(
            f"preset {preset.name!r}: the divergence {name} has no threshold of its own: give it thresholds, or set "
            "algorithm.overrides.threshold_negative and algorithm.overrides.threshold_positive"
        )
    own = dict.fromkeys(thresholds, delta) | {"topk": _default_topk(row)}
    return {field: value for field, value in own.items() if field not in overrides}


def _lookup(name: str) -> dict[str, Preset]:
    if name not in _TABLE:
        hint = did_you_mean(name, names(), most=2)
        raise PresetError(f"unknown preset {name!r}{hint}; presets: {', '.join(names())}")
    return _TABLE[name]
