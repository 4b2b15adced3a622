"""How one process ends: an exit status, and one line that says why."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from megatron_dppo.errors import UserError
from megatron_dppo.launch.secrets import redact

PROGRAM = "megatron-dppo"
PEER_GRACE_SECONDS = 15.0
"""How long a rank that lost a peer lets the peer's own reason come first."""
EXIT_GRACE_SECONDS = 60
"""A failed rank is gone this much later, whatever its exit handlers do."""

_PR_SET_PDEATHSIG = 1
_PEER_LOSS = ("connection closed by peer", "connection reset by peer", "broken pipe", "socket closed", "remote process")


def exit_status(run: Callable[[], int | None]) -> int:
    """Call `run` and return the status that the process should exit with:

    0 (or what `run` returned), 1 unexpected exception, 2 `UserError`, 130 interrupted (Ctrl-C), 143 terminated.

    Run alone, the process prints the reason as its last line on stderr (a `UserError` without traceback). Under
    torchrun or `launch_local` it hands the reason to the launcher, through torch's error file, and prints nothing: the
    launcher is the last to write to the terminal. Notes of the exception belong to its reason; secrets are
    left out. SIGTERM and SIGINT
    unwind the stack, so that `finally` blocks close engines and files. A rank whose collective failed because another
    rank is gone first waits for the launcher to end it, so that the other rank's reason is the one reported.
    """
    under_launcher = bool(os.environ.get("TORCHELASTIC_ERROR_FILE"))
    if under_launcher:
        # Also when the launcher is killed with SIGKILL its ranks must not stay behind.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    received: list[signal.Signals] = []
    try:
        with _signals_interrupt(received, once=under_launcher):
            try:
                return run() or 0
            except Exception as error:
                if under_launcher and lost_a_peer(error):
                    time.sleep(PEER_GRACE_SECONDS)
                raise
    except UserError as error:
        status, details, reason = 2, "", f"{PROGRAM}: error: {_with_notes(error)}"
    except KeyboardInterrupt:
        number = received[0] if received else signal.SIGINT
        status, details, reason = 128 + number, "", f"{PROGRAM}: stopped by {number.name}"
    except Exception as error:
        rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
        said = f"{rank}{type(error).__name__}: {_with_notes(error)}"
        status, details, reason = 1, traceback.format_exc(), f"{PROGRAM}: failed: {said}"
    details, reason = redact(details), redact(reason)
    if not under_launcher:
        print(f"{details}{reason}", file=sys.stderr, flush=True)
        return status
    if status < 128:
        _write_error_file(reason, f"{details}{reason}")
    # If an exit handler hangs, the kernel ends the process: a failed rank must never keep the others waiting.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(EXIT_GRACE_SECONDS)
    return status


@contextmanager
def _signals_interrupt(received: list[signal.Signals], *, once: bool) -> Iterator[None]:
    """Inside, the first SIGINT or SIGTERM is noted in `received` and raises KeyboardInterrupt, the one exception that
    Ray's blocking calls let through. With `once` later ones are ignored, for the rest of the process, so that closing
    down is not cut short (the launcher has its own time limit); else a second one kills."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        for known in before:
            signal.signal(known, signal.SIG_IGN if once else signal.SIG_DFL)
        received.append(signal.Signals(number))
        raise KeyboardInterrupt

    before = {known: signal.signal(known, stop) for known in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        if not once:
            for known, handler in before.items():
                signal.signal(known, handler)


def lost_a_peer(error: BaseException) -> bool:
    """Is this what a collective raises when another rank has gone, or Ray when rank 0, which started it, has?"""
    text = str(error).lower()
    from_ray = type(error).__module__.startswith("ray.") and os.environ.get("RANK", "0") != "0"
    return from_ray or type(error).__name__.startswith("Dist") or any(sign in text for sign in _PEER_LOSS)


def _with_notes(error: BaseException) -> str:
    """The message, and what was added to it (`add_note`) on the way up."""
    parts: list[str] = [str(error), *getattr(error, "__notes__", [])]
    return ". ".join([*(part.removesuffix(".") for part in parts[:-1]), parts[-1]])


def _write_error_file(reason: str, text: str) -> None:
    """torch's format; torchrun shows `py_callstack` in its closing summary, `launch_local` prints it as it is."""
    # torch compares whole seconds and takes the lowest rank on a tie; a reason must win over ranks ended because of it.
    extra = {"py_callstack": text, "timestamp": str(int(time.time()) - 1)}
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        json.dump({"message": {"message": reason, "extraInfo": extra}}, file)
