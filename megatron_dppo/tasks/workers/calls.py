"""What passes between the trainer, its workers and their processes: messages, in frames of four bytes of length and so
many bytes, over a socket that never blocks."""

from __future__ import annotations

import socket
import struct
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


HEADER = struct.Struct(">I")
LARGEST_REPLY = 1 << 20
"""Bytes of a frame that a worker or what runs in it may send."""


class Closed(Exception):
    """The other side is gone, or for the `reason` given cannot be listened to."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


class Channel:
    """One end. `queue` and `receive` return at once; what could not be sent yet goes with the next `flush`."""

    def __init__(self, end: socket.socket, largest: int) -> None:
        """`largest`: bytes of a frame that the other side may send; a longer one closes the channel."""
        end.setblocking(False)
        self._socket, self._largest = end, largest
        self._out, self._in = bytearray(), bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def unsent(self) -> bool:
        return bool(self._out)

    @property
    def partial(self) -> bool:
        """Something of a frame is here, and not all of it."""
        return bool(self._in)

    def queue(self, payload: bytes) -> None:
        self._out += HEADER.pack(len(payload)) + payload
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes. A side that is gone shows when something is received."""
        try:
            while self._out:
                del self._out[: self._socket.send(self._out[: 1 << 20])]
        except BlockingIOError:
            return
        except OSError:
            self._out.clear()

    def receive(self) -> list[bytes]:
        """Every whole frame that has come. Raises Closed where there will be no more and none is left."""
        ended = False
        try:
            while piece := self._socket.recv(1 << 16):
                self._in += piece
                if len(self._in) > self._largest + HEADER.size:
                    break
            else:
                ended = True
        except BlockingIOError:
            pass
        except OSError:
            ended = True
        frames = []
        while len(self._in) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._in)
            if length > self._largest:
                raise Closed(f"a reply of {length:,} bytes; at most {self._largest:,} are read")
            if len(self._in) < HEADER.size + length:
                break
            frames.append(bytes(self._in[HEADER.size : HEADER.size + length]))
            del self._in[: HEADER.size + length]
        if ended and not frames:
            raise Closed
        return frames

    def close(self) -> None:
        self._socket.close()
