"""The preset table's refusals and overrides, and docs/algorithms.md against the code."""

import dataclasses
import math
import re
from pathlib import Path

import pytest
import torch

from megatron_dppo.algorithm import (
    DIVERGENCES,
    Aggregation,
    Anchor,
    Preset,
    PresetError,
    TrustRegion,
    policy_loss,
    presets,
)

DOCS = Path(__file__).parents[2] / "docs" / "algorithms.md"


def test_unknown_names_come_with_the_nearest_match() -> None:
    with pytest.raises(PresetError, match="unknown preset 'dppo-binay-tv'; did you mean dppo-binary-tv"):
        presets.get("dppo-binay-tv")
    with pytest.raises(PresetError, match="presets: dppo-binary-tv, "):
        presets.get("something else")
    with pytest.raises(PresetError, match="it has: appendix-d"):
        presets.get("minirl", constants="appendix-f")
    with pytest.raises(PresetError, match="no field 'threshold'; did you mean threshold_"):
        presets.get("minirl", threshold=0.1)


def test_the_first_set_of_constants_is_the_default() -> None:
    for name in presets.names():
        assert presets.get(name).constants == presets.constant_sets(name)[0]
        for constants in presets.constant_sets(name):
            preset = presets.get(name, constants=constants)
            assert (preset.name, preset.constants) == (name, constants)


SOME_OTHER_VALUE = {
    "trust_region": None,  # contradicts the other fields by itself; covered below
    "anchor": "recomputed",
    "divergence": "topk-kl",
    "threshold_negative": 0.123,
    "threshold_positive": 0.456,
    "relax_below": 0.3,
    "relax_low": False,
    "relax_high": False,
    "dual_clip": 2.5,
    "band_low": 0.25,
    "band_high": 7.0,
    "band_level": "sequence-product",
    "band_recomputed": True,
    "topk": 7,
    "include_other": False,
    "ratio_cap": 2.0,
    "ratio_reference": "recomputed",
    "ratio_level": "sequence",
    "entropy_coefficient": 0.001,
    "aggregation": "token-mean",
    "loss": "torch:abs",
}
A_PRESET_WITH_THE_FIELD = {
    "relax_below": "relax-both",
    "relax_low": "relax-both",
    "relax_high": "relax-both",
    "divergence": "dppo-topk-tv",
    "dual_clip": "ppo-clip",
    "band_level": "icepop",
    "band_recomputed": "icepop",
    "topk": "dppo-topk-tv",
    "include_other": "dppo-topk-tv",
    "ratio_level": "ppo-clip",
}


def test_every_field_can_be_overridden() -> None:
    names = {f.name for f in dataclasses.fields(Preset)} - {"name", "constants"}
    assert names == set(SOME_OTHER_VALUE)
    for field, value in SOME_OTHER_VALUE.items():
        if field == "trust_region":
            continue
        base = presets.get(A_PRESET_WITH_THE_FIELD.get(field, "dppo-binary-tv"))
        changed = presets.get(base.name, **{field: value})
        assert getattr(changed, field) == value
        if field != "divergence":  # which brings its own thresholds, see below
            assert dataclasses.replace(changed, **{field: getattr(base, field)}) == base
    without = presets.get(
        "ppo-clip", trust_region="none", anchor=None, threshold_negative=None, threshold_positive=None
    )
    assert without.trust_region is TrustRegion.NONE


def test_a_divergence_brings_its_thresholds_and_k() -> None:
    """Not those of the preset it is put into: 0.2 is TV's, and no KL's."""
    for name in ("dppo-binary-tv", "dppo-topk-kl"):
        for constants in presets.constant_sets(name):
            for divergence in DIVERGENCES:
                changed = presets.get(name, constants=constants, divergence=divergence)
                assert dataclasses.replace(changed, name=f"dppo-{divergence}") == presets.get(
                    f"dppo-{divergence}", constants=constants
                )
    assert presets.get("dppo-binary-tv", divergence="binary-kl", threshold_positive=0.4).threshold_positive == 0.4


def test_an_override_may_turn_one_algorithm_into_another() -> None:
    decoupled = presets.get("dppo-binary-kl", constants="appendix-d", anchor="recomputed")
    assert dataclasses.replace(decoupled, name="dppo-binary-kl-decoupled") == presets.get("dppo-binary-kl-decoupled")
    assert decoupled.anchor is Anchor.RECOMPUTED
    assert decoupled.needs_recomputed_logp


def test_strings_of_a_config_file_are_understood() -> None:
    preset = presets.get("dppo-topk-tv", divergence="topk-kl", ratio_cap="inf", threshold_negative="0.05", topk=4)
    assert preset.divergence == "topk-kl"
    assert preset.ratio_cap == math.inf
    assert preset.threshold_negative == 0.05


@pytest.mark.parametrize(
    ("name", "overrides", "reason"),
    [
        ("pg-is", {"threshold_positive": 0.2}, "no effect, because there is no trust region"),
        ("pg-is", {"anchor": "rollout"}, "no effect, because there is no trust region"),
        ("minirl", {"anchor": None}, "needs an anchor"),
        ("minirl", {"anchor": "old"}, "'old' is not one of rollout, recomputed, null"),
        ("minirl", {"trust_region": None}, "None is not one of none, ratio-clip"),
        ("minirl", {"threshold_negative": None}, "needs threshold_negative"),
        ("minirl", {"threshold_positive": None}, "ratio-clip needs threshold_positive"),
        ("minirl", {"threshold_positive": -0.1}, "must be a number, 0 or more"),
        ("minirl", {"threshold_positive": "wide"}, "must be a number, 0 or more"),
        ("minirl", {"ratio_cap": math.nan}, "must be a number, 0 or more"),
        ("minirl", {"ratio_cap": True}, "must be a number, 0 or more"),
        ("minirl", {"ratio_cap": 0}, "would remove every gradient"),
        ("minirl", {"relax_low": True}, "the clip is not a relaxed one"),
        ("mask-0.5", {"threshold_positive": 0.5}, "only blocks negative advantages"),
        ("grpo-clip-higher", {"divergence": "binary-tv"}, "the trust region is ratio-clip"),
        ("dppo-binary-tv", {"divergence": None}, "needs divergence: one of binary-tv"),
        ("dppo-binary-tv", {"divergence": "topk-tv", "topk": None}, "needs topk >= 1"),
        ("dppo-binary-tv", {"divergence": "binary-kll"}, "topk-kl, nor an import path; did you mean binary-kl"),
        ("dppo-binary-tv", {"divergence": 3}, "must be a name"),
        ("dppo-binary-tv", {"divergence": "torch:abs"}, "has no threshold of its own"),
        ("minirl", {"loss": "abs"}, "must be an import path package.module:function"),
        ("dppo-binary-tv", {"topk": 20}, "not a top-K one"),
        ("dppo-topk-tv", {"topk": None}, "needs topk >= 1"),
        ("dppo-topk-tv", {"topk": 0}, "needs topk >= 1"),
        ("dppo-topk-tv", {"topk": 2.5}, "needs topk >= 1"),
        ("dppo-topk-kl", {"include_other": False}, "only top-K TV can leave"),
        ("relax-both", {"relax_low": False, "relax_high": False}, "at least one end"),
        ("relax-both", {"relax_low": "false"}, "must be true or false"),
        ("relax-both", {"relax_below": None}, "needs relax_below"),
        ("dppo-binary-tv", {"ratio_level": "sequence"}, "masks single tokens"),
        ("ppo-clip", {"ratio_level": "sequence-product"}, "set trust_region to none"),
        ("pg-is", {"band_level": "sequence"}, "there is no band"),
        ("pg-is", {"band_recomputed": True}, "there is no band"),
        ("icepop", {"band_low": 6}, "band_low=6.0 is above band_high=5.0"),
        ("icepop", {"band_low": -1}, "must be a number, 0 or more"),
        ("icepop", {"band_level": "batch"}, "is not one of token, sequence, sequence-product"),
        ("icepop", {"dual_clip": 3}, "not a ratio clip"),
        ("ppo-dual-clip", {"dual_clip": 1}, "dual_clip=1 must exceed 1"),
    ],
)
def test_contradictions_are_refused_with_the_reason(name: str, overrides: dict[str, object], reason: str) -> None:
    with pytest.raises(PresetError, match=re.escape(reason)) as error:
        presets.get(name, **overrides)
    assert name in str(error.value)


def test_what_a_preset_needs() -> None:
    recomputing = {n for n in presets.names() if presets.get(n).needs_recomputed_logp}
    assert recomputing == {
        "minirl",
        "minirl-tis",
        "mask-0.5-recompute",
        "icepop-decoupled",
        *(f"dppo-{name}-decoupled" for name in DIVERGENCES),
    }
    assert {n for n in presets.names() if presets.get(n).needs_topk} == {
        f"dppo-topk-{d}{suffix}" for d in ("tv", "kl") for suffix in ("", "-decoupled")
    }
    assert presets.get("ppo-clip", ratio_reference="recomputed").needs_recomputed_logp


def number(value: float | None) -> str:
    return "-" if value is None else "inf" if math.isinf(value) else f"{value:g}"


def documented_row(preset: Preset) -> str:
    """The row of docs/algorithms.md that this preset must have, up to its last columns (the paper's place)."""
    cells = [
        f"`{preset.name}`",
        f"`{preset.constants}`",
        "-" if preset.anchor is None else str(preset.anchor),
        number(preset.threshold_negative),
        number(preset.threshold_positive),
        number(preset.ratio_cap),
        "-" if preset.topk is None else str(preset.topk),
        number(preset.relax_below),
        f"{number(preset.band_low)} to {number(preset.band_high)}" if preset.has_band else "-",
    ]
    return "| " + " | ".join(cells) + " |"


def test_docs_table_is_the_code() -> None:
    rows = [line for line in DOCS.read_text().splitlines() if re.match(r"\| `[a-z0-9.-]+` \| `", line)]
    expected = [
        documented_row(presets.get(name, constants=constants))
        for name in presets.names()
        for constants in presets.constant_sets(name)
    ]
    assert [row[: len(want)] for row, want in zip(rows, expected, strict=True)] == expected


def test_docs_name_every_field_and_metric() -> None:
    text = DOCS.read_text()
    for field in dataclasses.fields(Preset):
        assert f"`{field.name}`" in text, field.name
    pi, mu, advantages = torch.tensor([[-0.1, -3.0], [-3.0, -0.1], [1.0, -1.0]])  # both are blocked
    everything = policy_loss(
        presets.get("dppo-binary-tv"), pi, mu, advantages, loss_mask=pi, divergence=-pi - mu, entropy=-pi, penalty=pi
    ).metrics.finalize(1)
    assert len(everything) == 26
    for metric in everything:
        assert f"`{metric}`" in text, metric


def test_docs_name_every_aggregation() -> None:
    text = DOCS.read_text()
    for mode in Aggregation:
        default = " (default)" if mode == presets.get("dppo-binary-tv").aggregation else ""
        assert f"| `{mode}`{default}" in text
