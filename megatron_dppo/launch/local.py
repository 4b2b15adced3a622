"""Starting the ranks of one node: torchrun's own agent, with the terminal kept readable."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from megatron_dppo.errors import first_line
from megatron_dppo.launch.rank import PROGRAM, hand_over, reasons
from megatron_dppo.launch.restarts import Outcome, Restarts
from megatron_dppo.launch.secrets import redact

if TYPE_CHECKING:  # torch takes seconds, and whoever looks after the health of a container imports this package
    from megatron_dppo.launch.meeting import Meeting

_PR_SET_CHILD_SUBREAPER = 36


def launch_local(
    command: Sequence[str],
    *,
    processes: int,
    on_stop: str = "",
    restarts: Restarts | None = None,
    meeting: Meeting | None = None,
    beside: Callable[[], AbstractContextManager[None]] = nullcontext,
    signals: str = "SIGTERM,SIGINT,SIGHUP",
) -> int:
    """Run `command` in `processes` ranks of this machine, as `torchrun --standalone` does, and return the exit status.

    Rank 0 has the terminal; the others write to files, which are kept, and named, when a rank failed unexpectedly. If
    one rank fails all are ended, and started again as `restarts` says (by default they are not); the last line on
    stderr is the rank's reason. On Ctrl-C or SIGTERM the status is 130 or 143 and the last line ends with `on_stop`.
    When this returns, no descendant of the ranks is left, not even one that detached itself.

    meeting  where the ranks of several nodes meet
    beside   what they need on every node, opened for each start of them
    signals  that end the ranks
    """
    from megatron_dppo.launch.meeting import JobOver, Meeting, NodeLost, Nodes

    # Orphans of a dead rank become children of this process, so that they can be found and ended.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    meeting = meeting or Meeting(Nodes(), restarts or Restarts())
    started, again = time.time(), True
    while again:
        logs = tempfile.mkdtemp(prefix=f"{PROGRAM}-")
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            overrides = meeting.join()
            with beside():
                outcome = _run_ranks([*command, *overrides], processes, logs, meeting, signals)
        except JobOver as over:
            outcome = over.outcome
            break
        except NodeLost as lost:
            outcome = Outcome(1, f"{PROGRAM}: failed: {lost}", lost=True)
        _end_descendants()
        _free_shared_memory(started)
        again, outcome = meeting.again(outcome)
        if again:
            shutil.rmtree(logs, ignore_errors=True)
            for number, handler in handlers.items():
                signal.signal(number, handler)
    status, message = outcome.status, outcome.message
    if status > 128:
        message = f"{PROGRAM}: {message}; all ranks are stopped" + (f". {on_stop}" if on_stop else "")
    if status == 1:
        message += f" (output of the ranks: {logs})"
    else:
        shutil.rmtree(logs, ignore_errors=True)
    message = redact(message)
    if message:
        print(message, file=sys.stderr, flush=True)
    if 0 < status < 128 and os.environ.get("TORCHELASTIC_ERROR_FILE"):  # a torchrun without options, see `run_example`
        hand_over(message.splitlines()[-1], message, status=status)
    return status


def _run_ranks(command: Sequence[str], processes: int, logs: str, meeting: Meeting, signals: str) -> Outcome:
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from megatron_dppo.launch.meeting import NodeLost

    logging.disable(logging.ERROR)  # the agent's account of signals and exit codes says less than our last line
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    run = meeting.run = uuid.uuid4().hex
    rendezvous_handler_registry.register(run, lambda parameters: meeting)
    config = LaunchConfig(
        min_nodes=meeting.nodes.count,
        max_nodes=meeting.nodes.count,
        nproc_per_node=processes,
        rdzv_backend=run,
        run_id=run,
        max_restarts=0,  # ours are of all nodes, with their Ray
        logs_specs=DefaultLogsSpecs(log_dir=logs, redirects=dict.fromkeys(range(1, processes), Std.ALL)),
        signals_to_handle=signals,
    )
    try:
        with meeting.with_ranks():
            elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        # Whichever rank the agent saw first, and whatever it did to the others then: what they wrote counts.
        said = reasons(Path(logs)).values()
        if said:
            first = min(said, key=lambda one: (one["after_peer"], one["status"] != 2, int(one["timestamp"])))
            return Outcome(first["status"], first["py_callstack"], lost=first["after_peer"])
        rank, failure = min(error.failures.items(), key=lambda item: item[1].timestamp)
        words = _exit_in_words(failure.exitcode)
        return Outcome(1, f"{PROGRAM}: failed: rank {rank} ended with {words}", lost=True)
    except DistError as error:  # of the store where the agents wait for each other
        raise NodeLost(f"node 0 was lost ({first_line(error)})") from error
    except SignalException as error:
        word = "interrupted" if error.sigval == signal.SIGINT else f"stopped by {error.sigval.name}"
        return Outcome(128 + error.sigval, word)
    return Outcome(0)


def _exit_in_words(exitcode: int) -> str:
    if exitcode >= 0:
        return f"status {exitcode}, without giving a reason"
    name = signal.Signals(-exitcode).name
    return f"{name} (out of memory, or killed by hand)" if name == "SIGKILL" else name


def _end_descendants(patience: float = 5.0) -> None:
    """Wait for processes that are closing down by themselves, then terminate what is left, then kill it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # an impatient second Ctrl-C must not leave processes behind
    for ending in (None, signal.SIGTERM, signal.SIGKILL):
        left = psutil.Process().children(recursive=True)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                if ending is not None:
                    process.send_signal(ending)
        psutil.wait_procs(left, timeout=patience)


def _free_shared_memory(since: float) -> None:
    """Remove the semaphores and segments of Python's multiprocessing that were made since then and that no process
    maps: their resource tracker, which would have removed them, was killed too."""
    made = [file for pattern in ("sem.mp-*", "psm_*") for file in Path("/dev/shm").glob(pattern)]
    mapped: set[int] = set()  # by inode: whoever makes a semaphore maps it under another name, which it then deletes
    for maps in Path("/proc").glob("[0-9]*/maps") if made else ():
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            mapped.update(int(line.split()[4]) for line in maps.read_text().splitlines() if "/dev/shm/" in line)
    for file in made:
        with contextlib.suppress(OSError):
            status = file.stat()
            if status.st_uid == os.getuid() and status.st_ctime >= since and status.st_ino not in mapped:
                file.unlink()
