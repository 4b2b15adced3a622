from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from actor_step.cases import CASES
from actor_step.report import whole_step
from bench_actor_step import Job, _visible, drive

from megatron_dppo.launch.arguments import out_folder


@pytest.mark.parametrize(
    ("visible", "named"), [("2,3", ["2", "3"]), ("GPU-a1,GPU-b2", ["GPU-a1", "GPU-b2"]), (None, ["0", "1"])]
)
def test_cases_run_on_the_gpus_that_the_tool_may_see(
    visible: str | None, named: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of them on a machine of four, say: 0 and 1 are its own numbers, and another job's GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [_visible(gpu) for gpu in (0, 1)] == named


def test_what_was_measured_is_written_when_a_case_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at the end of all: a machine's time may be over before."""
    out, seen = out_folder(str(tmp_path / "out")), []

    def launch(case: object, gpus: list[int], folder: Path, arguments: argparse.Namespace) -> Job:
        chosen = next(one for one in CASES if one is case)
        if (out / "bench.json").exists():
            seen.append(sorted(json.loads((out / "bench.json").read_text())["cases"]))
        (folder / f"{chosen.name}.json").write_text('{"tokens": 1}')
        process = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
        (folder / f"{chosen.name}.log").write_text("")
        return Job(chosen, gpus, process, folder / f"{chosen.name}.log", time.monotonic() + 60)

    monkeypatch.setattr("bench_actor_step._launch", launch)
    options = {"out": out, "only": ["same-1", "experts"], "tiny": True, "total": 60.0, "timeout": 60.0}
    assert drive(argparse.Namespace(**options)) == 0
    names = [case.name for case in CASES if case.name in options["only"]]
    assert seen == [[names[0]]]
    assert sorted(json.loads((out / "bench.json").read_text())["cases"]) == sorted(names)
    assert (out / "bench.md").exists()


@pytest.mark.parametrize(
    ("name", "layers", "kinds"),
    [
        ("full-1", {"layer": 48}, {"layer": 0.03}),
        (
            "full-1-next",
            {"linear_attention": 36, "full_attention": 12},
            {"linear_attention": 0.05, "full_attention": 0.02},
        ),
        (
            "full-1-oss",
            {"sliding_attention": 12, "full_attention": 12},
            {"sliding_attention": 0.01, "full_attention": 0.02},
        ),
    ],
)
def test_a_whole_step_is_its_kinds_of_layers(name: str, layers: dict[str, int], kinds: dict[str, float]) -> None:
    """Those of the published model, in their number, whatever the mixture of the depths that were measured."""
    cases = [case for case in CASES if case.name.rpartition("-")[0] == name]
    steps = [0.1 + sum(kinds[kind] * count for kind, count in case.kinds.items()) for case in cases]
    assert whole_step(cases, steps) == pytest.approx(0.1 + sum(kinds[kind] * layers[kind] for kind in layers))
    if len(kinds) == 2 and len(cases) == 3:
        assert whole_step(cases[1:], steps[1:]) is None, "what tells the kinds apart is missing"
