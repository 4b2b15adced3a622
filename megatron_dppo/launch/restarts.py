"""Whether ranks that were lost are started again, and from where."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from megatron_dppo.errors import UserError
from megatron_dppo.launch.rank import PROGRAM
from megatron_dppo.launch.secrets import redact

_STATES, _LATEST = "checkpoints/step_????????/state.json", "checkpoints/latest"
_OF_A_RUN = ("metrics.jsonl", "samples.jsonl", "masked_tokens.jsonl", "mismatch.npz", "tensorboard")
RESTARTS = "restarts.jsonl"
"""Of the run's folder: a line for every time that ranks were started again."""


@dataclass(frozen=True)
class Outcome:
    """How the ranks ended: an exit status as of `launch/rank.py: exit_status`, and the closing message."""

    status: int
    message: str = ""
    lost: bool = False
    """A rank or a node is gone without a reason of its own."""


@dataclass
class Restarts:
    """Of the run in `folder`, which node 0 asks.

    Ranks that ended without being told to (status 1) are started again, from the newest whole state or else from the
    beginning, `limit` times in a row at most. What brings a new state begins the count anew: a run of weeks may lose a
    node now and then. A reason that comes back word for word without a new state is no loss, and ends the run, as does
    a `UserError`.
    """

    folder: Path | None = None
    limit: int = 0
    goes_on: bool = False
    """Whether the first start, too, goes on from what an earlier one left."""
    seen_after_s: float = 0.0
    """How long a shared file system may take to show the state that another machine saved."""

    _starts: int = field(default=0, init=False)
    _in_a_row: int = field(default=0, init=False)
    _before: set[tuple[str, int]] = field(default_factory=set, init=False)
    _reason: str = field(default="", init=False)

    def state(self) -> str:
        """Name of the state that a start goes on from, see `latest_state`: not always that of the highest step. ""
        where there is none."""
        found = sorted(name for name, _ in self._saved())
        if self.folder is None or not found:
            return ""
        with suppress(OSError):
            named = (self.folder / _LATEST).read_bytes().decode(errors="replace").strip()
            if named in found:
                return named
        return found[-1]

    def _saved(self) -> set[tuple[str, int]]:
        """The states by name and time: ranks that went back may save a step again."""
        files = [] if self.folder is None else list(self.folder.glob(_STATES))
        return {(file.parent.name, file.stat().st_mtime_ns) for file in files}

    def see(self, state: str) -> str:
        """Wait until it is the newest that this machine sees, for a while, and say so where it is not; returns it."""
        end = time.monotonic() + self.seen_after_s
        while (here := self.state()) != state:
            if time.monotonic() > end:
                say(
                    f"{self.folder} has {here or 'no state'} here and {state or 'no state'} on node 0, also after "
                    f"SEEN_AFTER_S={self.seen_after_s:.0f}: all nodes must share it"
                )
                break
            time.sleep(0.2)
        return state

    def begin(self) -> str:
        """What the next start goes on from, see `state`. Where that is nothing, the rows of an earlier start are put
        aside, in the run's folder: in a container that may be a mount."""
        self._starts += 1
        newest, self._before = self.state(), self._saved()
        if self.folder is None or (self._starts == 1 and not self.goes_on):
            return ""
        rows = [self.folder / name for name in _OF_A_RUN if (self.folder / name).exists()]
        end = time.monotonic() + self.seen_after_s
        while rows and not newest and self._starts == 1 and time.monotonic() < end:
            time.sleep(0.2)
            newest, self._before = self.state(), self._saved()
        if not newest and rows:
            lost = self.folder / f"lost-{time.strftime('%Y%m%d-%H%M%S')}"
            lost.mkdir(exist_ok=True)
            for path in rows:
                path.rename(lost / path.name)
        return newest

    def again(self, outcome: Outcome) -> bool:
        """Whether to start again; said on stderr and counted in the run's folder."""
        if outcome.status != 1 or self.folder is None or not self.folder.is_dir():
            return False
        message = redact(outcome.message)
        state, reason = self.state(), message[max(0, message.rfind(f"{PROGRAM}: ")) :].partition("\n")[0]
        if brought := self._saved() - self._before:
            self._in_a_row = 0
        step = int(state.rpartition("_")[2]) if state else 0
        newest = f"the newest state is the one after step {step}" if state else "no state is saved"
        if not brought and not outcome.lost and reason == self._reason:
            say(f"the same error came again; {newest}")
            return False
        self._reason = reason
        if self._in_a_row >= self.limit:
            if self.limit:
                say(f"no new state after MAX_RESTARTS={self.limit} restarts; {newest}")
            return False
        self._in_a_row += 1
        line = {"time": time.time(), "restart": self._in_a_row, "of": self.limit, "after_step": step, "reason": reason}
        try:
            with open(self.folder / RESTARTS, "a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:  # of a full disk the ranks have more to say
            say(f"{self.folder / RESTARTS} cannot be written: {error.strerror}")
        where = f"from the state after step {step}" if state else "from the beginning, as no state is saved"
        say(f"restart {self._in_a_row} of {self.limit} {where}", after=f"{reason}\n")
        return True


def say(what: str, *, after: str = "") -> None:
    """One line on the terminal."""
    print(f"{after}{PROGRAM}: {what}", file=sys.stderr, flush=True)


def max_restarts() -> int:
    """MAX_RESTARTS of the environment, 3 by default."""
    text = os.environ.get("MAX_RESTARTS") or "3"
    if not text.isdecimal():
        raise UserError(f"MAX_RESTARTS={text}: must be a whole number; 0 never starts lost ranks again")
    return int(text)
