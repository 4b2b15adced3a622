"""How long the parts of something take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Wall-clock seconds as metrics, `GROUP/PART_s`: of a part that comes again, all together."""

    def __init__(self, group: str) -> None:
        self._group = group
        self.metrics: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start, key = time.perf_counter(), f"{self._group}/{part}_s"
        try:
            yield
        finally:
            self.metrics[key] = self.metrics.get(key, 0.0) + time.perf_counter() - start
