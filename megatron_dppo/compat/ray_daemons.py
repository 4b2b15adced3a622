"""A Ray of one machine: on loopback, and without the daemons that it has no use for.

Ray 2.60 has no public option for either (`ray start` has one for the first, hidden): the log monitor, which sends what
workers print to drivers that asked for it, the autoscaler's monitor, and the API server, which without a dashboard only
counts how Ray is used, and for whose start `ray.init` waits. Each is a Python process that takes a second of CPU to
start, while the trainer and the engines load.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray._private import ray_constants, services
from ray._private.parameter import RayParams


@contextmanager
def fewer_daemons() -> Iterator[None]:
    """Let a Ray that is started inside have neither monitor nor an API server."""
    initialise, start_api_server = RayParams.__init__, services.start_api_server

    @functools.wraps(initialise)
    def without_monitors(self: RayParams, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs | {"include_log_monitor": False, "no_monitor": True})

    RayParams.__init__ = without_monitors
    services.start_api_server = lambda *args, **options: ("", None)  # its address, and no process
    try:
        yield
    finally:
        RayParams.__init__, services.start_api_server = initialise, start_api_server


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
