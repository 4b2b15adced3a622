"""A training run whose engines are disturbed: fleet_ranks.py CONFIG FAULTS [a.b=c ...], FAULTS like kill@3,stop@4.

`kill@0` kills the last engine while it loads."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray

from megatron_dppo.config.load import load_config
from megatron_dppo.launch import exit_status
from megatron_dppo.rollout.fleet.fleet import EngineFleet
from megatron_dppo.trainer.train import train
from tests.processes import processes_of


def disturb(fleet: EngineFleet, fault: str, number: int) -> None:
    """Kill an engine's processes, or stop its core, once it has work."""
    while len(fleet.members) <= number:  # an engine may still be loading
        time.sleep(0.1)
    replica = fleet._dispatcher._replicas[number]
    processes = processes_of(replica.engine)
    while not replica.running:
        time.sleep(0.001)
    for process in processes if fault == "kill" else processes[1:]:
        os.kill(process, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)


if __name__ == "__main__":
    faults = dict(reversed(fault.split("@")) for fault in sys.argv[2].split(",") if fault)
    sampled = EngineFleet.generate_stored
    calls = 0

    def generate_stored(self: EngineFleet, *arguments: Any, **options: Any) -> Any:
        global calls
        calls += 1
        if calls == 1:
            self.ready_members()  # also for the one that was killed while it loaded: later faults want two
        if (fault := faults.get(str(calls))) is not None:
            threading.Thread(target=disturb, args=(self, fault, len(self.members) - 1), daemon=True).start()
        return sampled(self, *arguments, **options)

    made = EngineFleet.__init__

    def make(self: EngineFleet, *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **options)
        if "0" in faults:
            ray.kill(self._dispatcher._replicas[-1].engine._host)

    EngineFleet.__init__ = make  # type: ignore[method-assign]
    EngineFleet.generate_stored = generate_stored  # type: ignore[method-assign]
    sys.exit(exit_status(lambda: train(load_config(Path(sys.argv[1]), sys.argv[3:]))))
