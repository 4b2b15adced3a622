"""How the tests are shared out between the worker processes of `make test`."""

from __future__ import annotations

import pytest

SHARED = ("ray_session", "served_mixed")
"""Fixtures that take half a minute to start: what uses one stays together, so that there is one of each."""


def group_of(item: pytest.Item) -> str:
    """Tests of one group run one after another in the same worker: those of a shared fixture, those that would share a
    GPU with another worker, else those of a file."""
    if item.get_closest_marker("gpu") is not None:
        return "gpu"
    used = getattr(item, "fixturenames", ())
    return next((fixture for fixture in SHARED if fixture in used), item.nodeid.split("::", 1)[0])


@pytest.hookimpl(tryfirst=True)  # the plugin reads the groups in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Group the tests, and begin with the groups that hold a slow one: whatever is long and begins last makes one
    worker wait for the other. Without workers nothing changes."""
    if not hasattr(config, "workerinput"):
        return
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        name = group_of(item)
        item.add_marker(pytest.mark.xdist_group(name))
        groups.setdefault(name, []).append(item)
    slow = {name for name, group in groups.items() if any(item.get_closest_marker("slow") for item in group)}
    order = sorted(groups, key=lambda name: (name not in SHARED, name not in slow))
    items[:] = [item for name in order for item in groups[name]]
