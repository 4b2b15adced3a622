"""What a worker is asked, what it answers, and what it offers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

Handler = Callable[[Any], dict[str, Any]]


class Service(Protocol):
    """Something that workers run: plain data that can be pickled, with the code beside it."""

    def prepare(self) -> None:
        """Import and load what takes long, once in each worker, before a model's text is there. Raises UserError."""
        ...

    def open(self, opening: Any) -> Handler:
        """In a new process, before the sandbox closes: what answers its calls, by dictionaries that JSON can say."""
        ...


@dataclass(frozen=True)
class Hosted:
    """A service, and how its processes are held."""

    service: Service
    sandboxed: bool
    """See `sandbox.lock_down`; otherwise the clean environment and the limit of memory are all."""
    single: bool
    """A process for each call. Otherwise one is kept for the next call of the same process name."""
    readable: tuple[str, ...] = ()
    """Files and folders that it reads, besides code."""


@dataclass(frozen=True)
class Start:
    """The first message to a worker."""

    services: dict[str, Hosted]
    memory_bytes: int
    """Address space of every process."""


@dataclass(frozen=True)
class Call:
    """A question to the process `process` of `service`, which is started if there is none."""

    service: str
    process: str
    payload: Any
    timeout_s: float
    opening: Any = ()
    """What `Service.open` gets; None: the process must be there already."""
    pinned: bool = False
    """The process name means one process among all workers, not one in each."""


@dataclass(frozen=True)
class Asked:
    """A call on its way. `secret` comes back with the answer, and never reaches the process that answers."""

    number: int
    secret: str
    call: Call


@dataclass(frozen=True)
class Outcome:
    """What became of a call: `reply`, or why there is none."""

    reply: dict[str, Any] | None = field(default=None)
    error: str = ""
    timed_out: bool = False
