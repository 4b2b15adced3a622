"""One process at a time in a folder, also where the folder is on NFS and its users on different machines."""

from __future__ import annotations

import json
import logging
import os
import random
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megatron_dppo.errors import UserError, file_errors

BEAT_S = 5.0
"""Between two signs of life of a holder."""
STALE_S = 120.0
"""A lease of which no sign of life is seen for so long is taken over."""
FOLDER = ".lease"
_LOG = logging.getLogger(__name__)


@contextmanager
def lease(place: Path, *, of: str) -> Iterator[None]:
    """Hold the lease in the folder `place` (made, and removed at the end). `of` is what it guards, for errors.

    A lease is a file `place/N` that is made by a hard link, which one of several processes succeeds with, and that its
    holder rewrites every `BEAT_S`. Whoever finds one is refused (`UserError`) where the holder lives. It does not live

    - on this machine, where its process is gone (the machine's boot, the namespace of processes and the process's start
      are compared as well);
    - elsewhere, or in another container, where its file did not change for `STALE_S` as this process's own clock counts
      them; clocks of different machines are not compared.

    The next number is then the new lease: of several that find the same holder dead, one makes it. A holder whose file
    is gone (it stood still for longer than that) ends its process at once, before it writes on.
    """
    mine = _acquire(place, of)
    over = threading.Event()
    beating = threading.Thread(target=_beat, args=(mine, of, over), daemon=True, name="lease")
    beating.start()
    try:
        yield
    finally:
        over.set()
        beating.join()
        mine.unlink(missing_ok=True)
        with suppress(OSError):
            place.rmdir()


def _acquire(place: Path, of: str) -> Path:
    ours = _describe()
    told = False
    while True:
        with file_errors(f"{of} cannot be written", "choose another folder"):
            held = _newest(place)
            if held is not None:
                holder = _read(held)
                if holder is None:
                    continue  # released between two looks
                where = f"{holder['host']} (process {holder['pid']})"
                dead = _gone(holder)
                if dead is None:
                    if not told:
                        _LOG.warning("%s: waiting whether its holder on %s lives", of, where)
                        told = True
                    dead = _silent(held, holder)
                if not dead:
                    raise UserError(f"{of} is in use by another process on {where}; wait for it, or choose another")
            number = 1 if held is None else int(held.name) + 1
            mine = _make(place, number, ours)
            if mine is None:
                continue
            # Somebody may have taken the same dead one over and be done by now: then it is gone, and we begin anew.
            alone = _newest(place) == mine if held is None else held.exists() and _newest(place) == mine
            if alone:
                for old in _all(place):
                    if old != mine:
                        old.unlink(missing_ok=True)
                return mine
            mine.unlink(missing_ok=True)
            time.sleep(random.uniform(0.01, 0.1))


def _make(place: Path, number: int, ours: Mapping[str, Any]) -> Path | None:
    """The file `number` with our description; None where another process made it."""
    place.mkdir(parents=True, exist_ok=True)
    written = place / f"new-{secrets.token_hex(8)}"
    try:
        with open(written, "w") as file:
            file.write(_text(ours, 0))
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(written, place / str(number))
        # The answer to a link can get lost on NFS; the number of names tells.
        return place / str(number) if written.stat().st_nlink == 2 else None
    except FileNotFoundError:  # somebody else's release removed the folder
        return None
    finally:
        written.unlink(missing_ok=True)


def _all(place: Path) -> list[Path]:
    with suppress(FileNotFoundError):
        return sorted((file for file in place.iterdir() if file.name.isdecimal()), key=lambda file: int(file.name))
    return []


def _newest(place: Path) -> Path | None:
    return next(reversed(_all(place)), None)


def _describe() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": _start_of(os.getpid()),
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "processes": os.readlink("/proc/self/ns/pid"),
        "key": secrets.token_hex(16),
    }


def _text(description: Mapping[str, Any], beat: int) -> str:
    return json.dumps({"beat": f"{beat:012d}", **description})


def _read(file: Path) -> dict[str, Any] | None:
    """What a lease says; None where it is gone."""
    try:
        read = json.loads(file.read_text())
    except FileNotFoundError:
        return None
    except ValueError:  # cut off by a full disk, or not ours
        read = None
    return dict.fromkeys(("host", "pid", "boot", "processes"), "unknown") | (read if isinstance(read, dict) else {})


def _start_of(pid: int) -> str:
    """When a process began, in ticks since the boot; "" where there is none, or it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _gone(holder: Mapping[str, Any]) -> bool | None:
    """Whether the holder's process has ended; None where it cannot be seen from here."""
    here = _describe()
    if any(holder[key] != here[key] for key in ("boot", "processes")):
        return None
    return _start_of(holder["pid"]) != holder["started"]


def _silent(file: Path, holder: Mapping[str, Any]) -> bool:
    """Watch a lease: True where it stays as it is for `STALE_S`, False as soon as its holder gives a sign of life."""
    end = time.monotonic() + STALE_S
    while time.monotonic() < end:
        time.sleep(min(1.0, STALE_S / 10))
        now = _read(file)
        if now != holder:
            return now is None  # released: whoever comes first has it
    return True


def _beat(mine: Path, of: str, over: threading.Event) -> None:
    """Rewrite the file in place: where it was taken over, what is written goes nowhere."""
    try:
        file = open(mine, "r+")  # noqa: SIM115  (the same inode for as long as the lease is held)
    except OSError:
        _give_up(of)
    with file:
        description = json.loads(file.read())
        del description["beat"]
        beat = 0
        while not over.wait(BEAT_S):
            beat += 1
            with suppress(OSError):  # a file system that stumbles; the others see no sign of life meanwhile
                os.pwrite(file.fileno(), _text(description, beat).encode(), 0)
                os.fsync(file.fileno())
                if os.fstat(file.fileno()).st_nlink == 0 or not mine.exists():
                    _give_up(of)


def _give_up(of: str) -> None:
    print(f"megatron-dppo: error: {of} was taken over by another process; this one stood still", file=sys.stderr)
    os._exit(2)
