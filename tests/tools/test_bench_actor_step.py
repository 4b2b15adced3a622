from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from bench_actor_step import _visible


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
