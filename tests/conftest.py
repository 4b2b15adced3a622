"""How the tests are shared out between the worker processes of `make test`: by groups of files.

xdist's own groups cannot be used. Version 3.8 writes the group of a test to a field that pytest 9.2 does not read any
more, and without a word sends each test to whichever worker is free: every worker then sets up every fixture.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from megatron_dppo.launch.imports import uncollected

settings.register_profile(
    "same everywhere", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same everywhere")
"""The same examples in every run, however long they take: no change fails for what the one before did not meet."""

ENGINES = (
    *("test_engine", "test_engine_log", "test_lora_sync", "test_parity", "test_partial", "test_placement"),
    "test_warm_up",
    *("test_ray_session", "test_reward_workers"),
    *("test_routes_parity", "test_routes_pressure", "test_routes_record", "test_stored", "test_sync"),
)
GROUP_OF = {f"tests/rollout/{name}.py": "engines" for name in ENGINES} | {
    "tests/checkpoint/test_training_state_damage.py": "states",
    "tests/checkpoint/test_training_state_faults.py": "states",
    "tests/checkpoint/test_training_state_index.py": "states",
    "tests/trainer/test_evaluate_model.py": "engines",
    "tests/vocab_parallel/test_cuda.py": "gpu",
    "tests/compat/test_flash_delta_rule.py": "gpu",
}
"""Files that share what is slow to make (the engines of tests/rollout, vLLM in the test process, training states of
ranks) or what one test at a time may use (a GPU). Any other file is a group of its own."""

FIRST = (
    "engines",
    "tests/rollout/test_families.py",
    "tests/rollout/test_fleet.py",
    "tests/trainer/test_end_to_end.py",
    "tests/actor/test_matrix.py",
    "tests/docker/test_start_node.py",
    "tests/trainer/test_agents.py",
    "tests/examples/test_make_model.py",
    "tests/frame/test_example_script.py",
    "tests/examples/test_smollm2_lane.py",
    "tests/checkpoint/test_round_trip.py",
    "tests/planner/test_parameters.py",
    "tests/cluster/test_vanished_node.py",
    "tests/trainer/test_sudoku.py",
    "tests/trainer/test_agent_run.py",
)
"""Groups of a minute and more, longest first: what is long and begins last makes the other workers wait."""

SHARED = {"served": "engines", "served_mixed": "engines", "saved_states": "states"}
"""Fixtures of which there is to be one, and the group whose files may use it."""


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """What a test draws from torch without a generator does not depend on what ran before it in the process."""
    import torch

    torch.manual_seed(0)


def group_of(nodeid: str) -> str:
    """The group of a test: its tests run one after another in the same worker."""
    file = nodeid.split("::", 1)[0]
    return "gpu" if file.startswith("tests/gpu/") else GROUP_OF.get(file, file)


class GroupScheduling(LoadFileScheduling):
    """A worker that has run out of tests gets the next group."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def pytest_configure() -> None:
    """A torchrun without options listens on port 29500: a port for each worker. (PET_... is torchrun's own default.)

    When vLLM sets up its logging, absl (tensorboard's) closes the stream that was `sys.stderr` when it was imported: in
    a test pytest's, which then ends the whole session. The process's own is spared.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    os.environ["PET_MASTER_PORT"] = str(29500 + int(worker))
    if importlib.util.find_spec("absl"):
        from absl import logging

        logging.get_absl_handler().python_handler.setStream(sys.__stderr__)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collecting imports everything, which stays: Python's garbage collector need not look through it, now or later."""
    with uncollected():
        collected = yield
        gc.freeze()
    return collected


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling:
    return GroupScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long groups first, and no test in a group that lacks what it uses."""
    for item in items:
        group = group_of(item.nodeid)
        wanted = {SHARED[fixture] for fixture in getattr(item, "fixturenames", ()) if fixture in SHARED}
        if item.get_closest_marker("gpu") is not None:
            wanted.add("gpu")
        if not wanted <= {group}:
            raise pytest.UsageError(f"{item.nodeid} belongs to the group {wanted.pop()}: say so in tests/conftest.py")
    place = {group: number for number, group in enumerate(FIRST)}
    items.sort(key=lambda item: place.get(group_of(item.nodeid), len(FIRST)))
