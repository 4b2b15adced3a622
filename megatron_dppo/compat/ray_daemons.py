"""A Ray of one machine without the daemons that it has no use for.

Ray 2.60 has no public option for either (`ray start` has one for the first, hidden): the log monitor, which sends what
workers print to drivers that asked for it, and the autoscaler's monitor. Each is a Python process that takes a second
of CPU to start, while the trainer and the engines load.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
