"""Frames over a socket that never block: four bytes of length, then so many bytes."""

from __future__ import annotations

import socket
import struct

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
