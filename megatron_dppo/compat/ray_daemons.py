"""A Ray of one machine: on loopback, and without the daemons that it has no use for.

Ray 2.60 has no public option for either (`ray start` has one for the first, hidden): the log monitor, which sends what
workers print to drivers that asked for it, and the autoscaler's monitor. Each is a Python process that takes a second
of CPU to start, while the trainer and the engines load.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray._private import ray_constants
from ray._private.parameter import RayParams


@contextmanager
def fewer_daemons() -> Iterator[None]:
    """Let a Ray that is started inside have neither monitor."""
    initialise = RayParams.__init__

    @functools.wraps(initialise)
    def without_monitors(self: RayParams, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs | {"include_log_monitor": False, "no_monitor": True})

    RayParams.__init__ = without_monitors
    try:
        yield
    finally:
        RayParams.__init__ = initialise


@contextmanager
def on_loopback() -> Iterator[None]:
    """Let a Ray that is started or joined inside have the address 127.0.0.1, at which its servers listen on loopback
    alone (its metrics too). Ray does so on macOS and Windows; on Linux it takes the machine's own address, and replaces
    by that a 127.0.0.1 that it is given."""
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
