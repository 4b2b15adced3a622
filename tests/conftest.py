"""How the tests are shared out between the worker processes of `make test`."""

from __future__ import annotations

from pathlib import PurePath

import pytest

TOGETHER = ("tests/rollout/",)
"""Folders whose tests stay in one worker, because they share engines that take half a minute to start."""


def group_of(nodeid: str) -> str:
    """Tests of one group run one after another in the same worker: a file, or a folder of `TOGETHER`."""
    file = nodeid.split("::", 1)[0]
    return next((folder for folder in TOGETHER if file.startswith(folder)), file)


def is_on_a_gpu(item: pytest.Item) -> bool:
    """Whether the test would share a card with a test of another worker."""
    return item.get_closest_marker("gpu") is not None


@pytest.hookimpl(tryfirst=True)  # the plugin reads the groups in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Group the tests, and begin with the groups that hold a slow one: whatever is long and begins last makes one
    worker wait for the other. Without workers nothing changes."""
    if not hasattr(config, "workerinput"):
        return
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        name = "gpu" if is_on_a_gpu(item) else group_of(PurePath(item.nodeid).as_posix())
        item.add_marker(pytest.mark.xdist_group(name))
        groups.setdefault(name, []).append(item)
    slow = {name for name, group in groups.items() if any(item.get_closest_marker("slow") for item in group)}
    order = sorted(groups, key=lambda name: (name not in TOGETHER, name not in slow))
    items[:] = [item for name in order for item in groups[name]]
