"""What a harness may report, and what its processes load."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dppo.agents.harness import BadReport, Report, read_report

BOUNDS = (-10.0, 10.0)


@pytest.mark.parametrize(
    ("said", "report"),
    [
        ({"reward": 1}, Report(1.0)),
        ({"reward": -10.0, "correct": True}, Report(-10.0, correct=True)),
        ({"answer": "12"}, Report(answer="12")),
        ({"answer": "half a character \ud800"}, Report(answer="half a character ?")),
        ({"reward": 0, "turn_rewards": [0.5, 1]}, Report(0.0, {0: 0.5, 1: 1.0})),
        ({"reward": 0, "turn_rewards": {"2": 0.5}}, Report(0.0, {2: 0.5})),
        ({"reward": 1, "untrained_turns": [0, 2]}, Report(1.0, untrained=frozenset({0, 2}))),
        ({"answer": "", "turn_rewards": {}}, Report(answer="")),
        ({"answer": "1", "reward": None}, Report(answer="1")),
        ({"reward": 1, "answer": None, "turn_rewards": None, "untrained_turns": None, "correct": None}, Report(1.0)),
    ],
)
def test_reports(said: dict[str, Any], report: Report) -> None:
    assert read_report(said, 3, BOUNDS) == report


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (None, "no JSON object"),
        ([1.0], "no JSON object"),
        ({}, "a reward or an answer"),
        ({"reward": 1, "answer": "1"}, "not both"),
        ({"reward": True}, "no number"),
        ({"reward": None}, "a reward or an answer"),
        ({"reward": "1"}, "no number"),
        ({"reward": float("nan")}, "outside of task.agent.bounds"),
        ({"reward": 10.5}, "outside of task.agent.bounds"),
        ({"reward": 10**400}, "outside of task.agent.bounds"),
        ({"reward": 1, "turn_rewards": [0, 0, 0, 0]}, "turn 3; the episode has turns 0 to 2"),
        ({"reward": 1, "turn_rewards": {"-1": 1}}, "turn '-1'"),
        ({"reward": 1, "turn_rewards": {"1": None}}, "no number"),
        ({"reward": 1, "turn_rewards": 5}, "give a list"),
        ({"reward": 1, "turn_rewards": {"\u0661": 1}}, "names turn"),
        ({"reward": 1, "untrained_turns": [3]}, "turn 3"),
        ({"reward": 1, "untrained_turns": {"0": True}}, "give a list"),
        ({"reward": 1, "correct": 1}, "no truth value"),
        ({"answer": 12}, "no text"),
        ({"reward": 1, "rewards": 2}, "known are"),
    ],
)
def test_what_is_no_report(said: Any, why: str) -> None:
    with pytest.raises(BadReport, match=why) as caught:
        read_report(said, 3, BOUNDS)
    assert "\n" not in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(["reward", "answer", "turn_rewards", "untrained_turns", "correct", "other"])


@given(JSON | st.dictionaries(NAMES, JSON, max_size=4), st.integers(0, 4))
def test_anything_is_a_report_within_bounds_or_refused(said: Any, turns: int) -> None:
    try:
        report = read_report(said, turns, BOUNDS)
    except BadReport:
        return
    assert all(BOUNDS[0] <= value <= BOUNDS[1] for value in (report.reward, *report.turns.values()))
    assert all(0 <= number < turns for number in report.turns)


def test_processes_of_episodes_load_no_torch() -> None:
    """Each would carry its pages, and every worker wait for its import."""
    code = "import sys, megatron_dppo.agents.harness; print([m for m in ('torch', 'ray', 'vllm') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "[]"


async def says_a_number(client, row):
    return {"reward": np.float32(0.5), "turn_rewards": [np.int64(1)], "correct": np.bool_(True)}


async def says_goodbye(client, row):
    sys.stdout = None
    sys.exit("no sandbox here")


async def says_an_object(client, row):
    return {"reward": 1.0, "answer": object}


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("says_a_number", {"said": {"reward": 0.5, "turn_rewards": [1], "correct": True}}),
        ("says_goodbye", {"failed": "SystemExit: no sandbox here"}),
        ("says_an_object", {"failed": "its report has <class 'object'>, which JSON cannot say"}),
    ],
)
def test_what_a_function_says_last(function: str, said: dict[str, Any]) -> None:
    """In a process of its own, as ever: numbers of numpy's are numbers, and who leaves has a reason."""
    code = f"""if 1:
        import json, os, sys
        from megatron_dppo.agents.harness import HarnessService
        from megatron_dppo.tasks.agent import AgentConfig
        kept = os.dup(1)
        service = HarnessService(AgentConfig(function={__name__ + ":" + function!r}), None, os.getcwd())
        told = service.open(None)(dict(row={{}}, base_url="http://127.0.0.1:9/v1", api_key="k", timeout_s=5.0))
        os.write(kept, json.dumps(told).encode())"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert json.loads(done.stdout) == said
