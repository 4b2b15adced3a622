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
import uuid
from collections.abc import Sequence
from pathlib import Path

import psutil

from megatron_dppo.launch.rank import PROGRAM, hand_over, reasons
from megatron_dppo.launch.secrets import redact

_PR_SET_CHILD_SUBREAPER = 36


def launch_local(command: Sequence[str], *, processes: int, on_stop: str = "") -> int:
    """Run `command` in `processes` ranks of this machine, as `torchrun --standalone` does, and return the exit status.

    Rank 0 has the terminal; the others write to files, which are kept, and named, when a rank failed unexpectedly. If
    one rank fails all are ended, and the last line on stderr is that rank's reason. On Ctrl-C or SIGTERM the status is
    130 or 143 and the last line ends with `on_stop`. When this returns, no descendant of the ranks is left, not even
    one that detached itself.
    """
    # Orphans of a dead rank become children of this process, so that they can be found and ended.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    logs = tempfile.mkdtemp(prefix=f"{PROGRAM}-")
    status, message = _run_ranks(command, processes, logs)
    _end_descendants()
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


def _run_ranks(command: Sequence[str], processes: int, logs: str) -> tuple[int, str]:
    """Exit status and closing message (empty on success)."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from megatron_dppo.launch.network import OneMachine

    logging.disable(logging.ERROR)  # the agent's account of signals and exit codes says less than our last line
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    run = uuid.uuid4().hex
    rendezvous_handler_registry.register(run, lambda parameters: OneMachine(parameters.run_id))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        rdzv_backend=run,
        run_id=run,
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=logs, redirects=dict.fromkeys(range(1, processes), Std.ALL)),
        signals_to_handle="SIGTERM,SIGINT,SIGHUP",
    )
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        # Whichever rank the agent saw first, and whatever it did to the others then: what they wrote counts.
        said = reasons(Path(logs)).values()
        if said:
            first = min(said, key=lambda one: (one["after_peer"], one["status"] != 2, int(one["timestamp"])))
            return first["status"], first["py_callstack"]
        rank, failure = min(error.failures.items(), key=lambda item: item[1].timestamp)
        return 1, f"{PROGRAM}: failed: rank {rank} ended with {_exit_in_words(failure.exitcode)}"
    except SignalException as error:
        return 128 + error.sigval, "interrupted" if error.sigval == signal.SIGINT else f"stopped by {error.sigval.name}"
    return 0, ""


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
