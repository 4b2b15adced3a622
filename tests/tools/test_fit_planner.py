"""The fit of the planner's efficiencies finds what steps were made with."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dppo.planner.gpus import efficiency_of, find_gpu
from megatron_dppo.planner.step_time import step_time

TOOLS = Path(__file__).parents[2] / "tools"
FITTED, UNSEEN = ("a1", "a1-small", "a1-short", "a1-long"), ("p1", "p3", "p6")


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> dict:
    monkeypatch.syspath_prepend(TOOLS)
    from actor_step.cases import CASES

    return {case.name: case for case in CASES}


def test_steps_of_a_slower_host_are_explained_and_others_foretold(cases: dict, tmp_path: Path) -> None:
    from compare_plan import plan

    gpu = find_gpu("h200-141g")
    known = efficiency_of(gpu.name)
    true = dataclasses.replace(known, layer_forward_s=1.6 * known.layer_forward_s, grouped=0.7 * known.grouped)

    def seconds(name: str, efficiency) -> float:
        return step_time(plan(cases[name], gpu), cases[name].microbatches, efficiency).total

    bench = {"cases": {name: {"with_replay": {"dppo-topk-tv, replay": [seconds(name, true)]}} for name in FITTED}}
    (tmp_path / "bench.json").write_text(json.dumps(bench))
    command = [sys.executable, str(TOOLS / "fit_planner.py"), str(tmp_path / "bench.json"), "--gpu", gpu.name]
    subprocess.run([*command, "--save", str(tmp_path / "fit.json")], check=True, capture_output=True, timeout=300)
    fitted = dataclasses.replace(known, **json.loads((tmp_path / "fit.json").read_text()))
    for name in FITTED:
        assert seconds(name, fitted) == pytest.approx(seconds(name, true), rel=0.02)
    for name in UNSEEN:
        assert seconds(name, known) < 0.97 * seconds(name, true)
        assert seconds(name, fitted) == pytest.approx(seconds(name, true), rel=0.08)
