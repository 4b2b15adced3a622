"""Which failures of engines end a run."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from megatron_dppo.rollout.engine import EnginesFailed, NoWeights

_VERSIONS_PER_FAILURE = 50
"""A fault that comes back in every step, or in every tenth, ends a run; one a day does not."""


class Failures:
    """Of a run's engines: more than `most` (`rollout.max_engine_failures`) end it, less one for every 50 versions of
    the weights that engines took meanwhile: a run of weeks may lose an engine now and then. So do two syncs in a row
    that bring no engine its first weights for one reason. What engines do to the first weights they get they do to
    them again; once one engine has taken weights, what fails is that engine."""

    def __init__(self, most: int) -> None:
        self._most, self._count = most, 0
        self._versions = 0
        """That engines took since the run began."""
        self._version: int | None = None
        """Of the weights that an engine took last; None: none ever did."""
        self._reasons: set[str] = set()
        """What the last sync failed with."""

    def begin_run(self) -> None:
        """Count anew. That engines have taken weights stays true."""
        self._count, self._versions, self._reasons = 0, 0, set()

    @property
    def so_far(self) -> str:
        """In words, for a warning."""
        return f"{self._count} engine failures count, more than rollout.max_engine_failures={self._most} end the run"

    def another(self, told: str) -> EnginesFailed | None:
        """Count one; the end of the run, if it is. `told`: which engine, and why."""
        self._count += 1
        if self._count <= self._most:
            return None
        return EnginesFailed(
            f"{self._count} engine failures, rollout.max_engine_failures={self._most} are allowed; the last one: "
            f"{told}; look into the engines' logs"
        )

    def of_sync(self, members: Collection[str], failed: Mapping[str, str], version: int) -> NoWeights | None:
        """The end of the run, if it is, after a sync of the weights `version` to `members`. `failed`: those that did
        not get them, and why. They are not counted."""
        if version != self._version and not failed.keys() >= set(members):  # not what a new engine is brought again
            self._version, self._versions = version, self._versions + 1
            if self._versions % _VERSIONS_PER_FAILURE == 0:
                self._count = max(0, self._count - 1)
        # Names of engines, sizes, process ids: what differs in the same error.
        reasons = {re.sub(r"\d+", "", why): f"engine {name} {why}" for name, why in failed.items()}
        # All of them: what one engine failed with the others may tell as "another member gave up".
        again = "; ".join(told for reason, told in reasons.items() if reason in self._reasons)
        self._reasons = set(reasons)
        if self._version is not None or not again:
            return None
        return NoWeights(
            f"no engine has got weights yet, and two syncs in a row failed alike; the last one: {again}; other "
            "engines would fail as well: look into the engines' logs"
        )
