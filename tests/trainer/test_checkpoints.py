"""Which changes of a configuration a resumed run accepts."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_dppo.config.schema import Config
from megatron_dppo.trainer.checkpoints import _fixed_settings, difference


def settings(**sections: dict[str, Any]) -> dict[str, Any]:
    return _fixed_settings(Config.model_validate({"run": {"dir": "r"}, "model": {"path": "m"}} | sections))


@pytest.mark.parametrize(
    ("before", "now", "changed"),
    [
        ({}, {}, ""),
        ({}, {"trainer": {"steps": 7}, "rollout": {"engines": 2}}, ""),
        ({}, {"optimizer": {"overlap_grad_reduce": True}}, ""),
        ({}, {"optimizer": {"lr": 0.5}}, "optimizer.lr was 1e-06 and is 0.5 now"),
        (
            {"algorithm": {"overrides": {"threshold_negative": 0.3}}},
            {},
            "algorithm.overrides.threshold_negative was 0.3 and is absent now",
        ),
        (
            {},
            {"algorithm": {"overrides": {"threshold_negative": 0.3}}},
            "algorithm.overrides.threshold_negative was absent and is 0.3 now",
        ),
        ({"lora": {"rank": 8, "alpha": 16}}, {}, "lora.alpha was 16.0 and is absent now"),
    ],
)
def test_what_decides_the_next_step_must_stay(before: dict[str, Any], now: dict[str, Any], changed: str) -> None:
    assert difference(settings(**before), settings(**now)) == changed
