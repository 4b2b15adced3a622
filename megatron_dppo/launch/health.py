"""`python -m megatron_dppo.launch.health FOLDER`: exit status 1 where a run under FOLDER has a rank without progress.

For the health checks of containers: it imports nothing heavy. FOLDER is a run's folder or one that holds runs. Only
living ranks of this host count, so that one hung node does not restart all, nor what a killed run left.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_dppo.launch.heartbeat import FOLDER, read_beats


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m megatron_dppo.launch.health FOLDER", file=sys.stderr)
        return 2
    root = Path(arguments[0])
    runs = [root, *(path for path in root.glob("*") if path.is_dir())]
    hung = [
        (run, beat)
        for run in runs
        if (run / FOLDER).is_dir()
        for beat in read_beats(run)
        if beat.host == socket.gethostname() and beat.overdue > 0 and beat.alive
    ]
    for run, beat in hung:
        where = f"rank {beat.rank} (pid {beat.pid}) in {beat.phase} of step {beat.step}"
        print(f"{run}: {where}, {beat.overdue:.0f} s overdue")
    return 1 if hung else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
