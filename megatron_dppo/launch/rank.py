"""How one process ends: an exit status, and one line that says why."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from megatron_dppo.errors import UserError
from megatron_dppo.launch.secrets import redact

PROGRAM = "megatron-dppo"
PEER_GRACE_SECONDS = 60.0
"""How long a rank that lost a peer lets the peer's own reason come first: that one may be closing its engines."""
EXIT_GRACE_SECONDS = 60
"""A failed rank is gone this much later, whatever its exit handlers do."""

_PR_SET_PDEATHSIG = 1
_PEER_LOSS = ("connection closed by peer", "connection reset by peer", "broken pipe", "socket closed", "remote process")


def exit_status(run: Callable[[], int | None]) -> int:
    """Call `run` and return the status that the process should exit with:

    0 (or what `run` returned), 1 unexpected exception, 2 `UserError`, 130 interrupted (Ctrl-C), 143 terminated.

    Run alone, the process prints the reason as its last line on stderr (without traceback that of a `UserError`, and
    that its output is piped into what has ended, as `head` does). Under
    torchrun or `launch_local` it hands the reason to the launcher, through torch's error file: the launcher is the last
    to write to the terminal. torchrun writes a page; the reason is printed once more below it. Notes of the exception
    belong to its reason; secrets are left out.

    SIGTERM and SIGINT unwind the stack, so that `finally` blocks close engines and files. A rank whose collective
    failed because another rank is gone first waits for the launcher to end it, so that the other rank's reason is the
    one reported. A `UserError` stays the reason where the launcher ends the rank while that is closing down because of
    it.
    """
    under_launcher = bool(os.environ.get("TORCHELASTIC_ERROR_FILE"))
    if under_launcher:
        die_with_parent()
    received: list[signal.Signals] = []
    after_peer = False
    try:
        with _signals_interrupt(received, once=under_launcher):
            try:
                return run() or 0
            except Exception as error:
                after_peer = under_launcher and lost_a_peer(error)
                if after_peer:
                    time.sleep(PEER_GRACE_SECONDS)
                raise
    except UserError as error:
        status, details, reason = 2, "", f"{PROGRAM}: error: {_with_notes(error)}"
    except KeyboardInterrupt as stop:
        asked = [one for one in (*received, *stop.args) if isinstance(one, signal.Signals)]
        number = asked[0] if asked else signal.SIGINT
        status, details, reason = 128 + number, "", f"{PROGRAM}: stopped by {number.name}"
        if (cause := _user_error_before(stop)) is not None:
            status, reason = 2, f"{PROGRAM}: error: {_with_notes(cause)}"
    except Exception as error:
        rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
        said = f"{rank}{type(error).__name__}: {_with_notes(error)}"
        status, details, reason = 1, traceback.format_exc(), f"{PROGRAM}: failed: {said}"
        if isinstance(error, BrokenPipeError) and not under_launcher and _output_unread():
            details, reason = "", f"{PROGRAM}: failed: nobody reads its output any more: {_with_notes(error)}"
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is printed at the exit
    details, reason = redact(details), redact(reason)
    if not under_launcher:
        print(f"{details}{reason}", file=sys.stderr, flush=True)
        return status
    if status < 128:
        hand_over(reason, f"{details}{reason}", status=status, after_peer=after_peer)
    # If an exit handler hangs, the kernel ends the process: a failed rank must never keep the others waiting.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(EXIT_GRACE_SECONDS)
    return status


def die_with_parent() -> None:
    """Have this process terminated when its parent ends, also by SIGKILL."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def _signals_interrupt(received: list[signal.Signals], *, once: bool) -> Iterator[None]:
    """Inside, the first SIGINT or SIGTERM is noted in `received` and raises KeyboardInterrupt, the one exception that
    Ray's blocking calls let through; again a moment later where it came in a `__del__`, from which Python lets no
    exception out. With `once` later ones are ignored, for the rest of the process, so that closing
    down is not cut short (the launcher has its own time limit); else a second one kills."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        for known in before:
            signal.signal(known, signal.SIG_IGN if once else signal.SIG_DFL)
        received.append(signal.Signals(number))
        raise KeyboardInterrupt(received[-1])

    def again(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def lost(found: Any) -> None:
        if received and found.exc_type is KeyboardInterrupt:
            signal.signal(signal.SIGALRM, again)
            signal.setitimer(signal.ITIMER_REAL, 0.05)
        else:
            hook(found)

    alarm = signal.getsignal(signal.SIGALRM)
    hook, sys.unraisablehook = sys.unraisablehook, lost
    before = {known: signal.signal(known, stop) for known in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        if received:  # nothing is to strike behind the run, in whose end a late one would hide its reason
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, alarm or signal.SIG_DFL)
        sys.unraisablehook = hook
        if not once:
            for known, handler in before.items():
                signal.signal(known, handler)


def _output_unread() -> bool:
    """Has the reader of standard output gone?"""
    with suppress(OSError, ValueError):
        output = select.poll()
        output.register(sys.stdout.fileno(), 0)
        return any(events & select.POLLERR for _, events in output.poll(0))
    return False


def lost_a_peer(error: BaseException) -> bool:
    """Is this what a collective raises when another rank has gone, or Ray when rank 0, which started it, has?"""
    text = str(error).lower()
    from_ray = type(error).__module__.startswith("ray.") and os.environ.get("RANK", "0") != "0"
    return from_ray or type(error).__name__.startswith("Dist") or any(sign in text for sign in _PEER_LOSS)


def _with_notes(error: BaseException) -> str:
    """The message, and what was added to it (`add_note`) on the way up."""
    parts: list[str] = [str(error), *getattr(error, "__notes__", [])]
    return ". ".join([*(part.removesuffix(".") for part in parts[:-1]), parts[-1]])


def _user_error_before(stop: BaseException) -> UserError | None:
    """What this process was closing down because of when it was stopped."""
    before = stop.__context__
    while before is not None and not isinstance(before, UserError):
        before = before.__context__
    return before


def hand_over(reason: str, text: str, *, status: int, after_peer: bool = False) -> None:
    """Write torch's error file; torchrun shows `text` in its closing page, `launch_local` prints it as it is. The first
    rank of a node with a reason of its own has it printed after torchrun's page as well."""
    # torch compares whole seconds and takes the lowest rank on a tie; a reason must win over ranks ended because of it.
    extra = {"py_callstack": text, "timestamp": str(int(time.time()) - 1), "status": status, "after_peer": after_peer}
    file = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps({"message": {"message": reason, "extraInfo": extra}}))
    partial.replace(file)
    launcher = psutil.Process(os.getppid())
    with suppress(OSError, psutil.Error):
        if not after_peer and any("torchrun" in part or "torch.distributed.run" in part for part in launcher.cmdline()):
            (file.parent.parent / "reason").touch(exist_ok=False)
            subprocess.Popen(
                [sys.executable, "-I", "-c", _LAST_WORD, str(launcher.pid), reason],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )


_LAST_WORD = """
import sys, time
end = time.monotonic() + 300
while time.monotonic() < end:
    try:
        if open(f"/proc/{sys.argv[1]}/stat").read().rpartition(")")[2].split()[0] in "ZX":
            break
    except OSError:
        break
    time.sleep(0.05)
print(sys.argv[2], file=sys.stderr)
"""
"""A program that prints a line when a process has ended."""


def reasons(folder: Path) -> dict[int, dict[str, Any]]:
    """By rank, what ranks that write to torch's log folder `folder` handed over."""
    found = {}
    for file in folder.glob("*/attempt_*/*/error.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            extra = json.loads(file.read_text())["message"]["extraInfo"]
            found[int(file.parent.name)] = {"status": 1, "after_peer": False} | extra
    return found
