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
from bench_actor_step import Job, _visible, drive


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
    out, seen = tmp_path / "out", []

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
