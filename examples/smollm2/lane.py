"""Runs one after another in one process, which keep their engine: it starts once, and each run gives it its weights.

```
lane 0, a process ─ engine ─ run, run, run ...      each takes the next run of the list that nobody has
lane 1            ─ engine ─ run, run, run ...      (a lock beside the run's folder), on this GPU or another
```
"""

from __future__ import annotations

import fcntl
import gc
import os
import shutil
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from enum import Enum, auto
from pathlib import Path
from threading import Timer
from typing import IO, Any

from torch.cuda import empty_cache

from examples.smollm2.plan import Job
from examples.smollm2.share import GpuShare
from megatron_dppo.checkpoint.state_folder import finished_states
from megatron_dppo.launch.stop import REQUEST, StopRequest
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.engine import RolloutFleet
from megatron_dppo.rollout.start import open_fleet
from megatron_dppo.trainer.history import CHECKPOINTS, METRICS_FILE, read_rows
from megatron_dppo.trainer.train import train


class KeptEngines:
    """`open_fleet` for runs that follow each other: engines stay as long as model and settings are the same. After an
    error new ones are started. To be closed."""

    def __init__(self) -> None:
        self._stack, self._of, self._fleet = ExitStack(), None, None
        self.used = False
        """Whether the run got engines that another one had before."""

    @contextmanager
    def __call__(
        self, ranks: Any, model: Path, config: RolloutConfig, *, made: Callable[[RolloutFleet], None], **options: Any
    ) -> Iterator[RolloutFleet | None]:
        # What the trainer alone looks at may differ.
        of = (model, config.model_copy(update={"schedule": "synchronous", "max_staleness": 1}))
        self.used = of == self._of
        if not self.used:
            self.close()
            self._fleet = self._stack.enter_context(open_fleet(ranks, model, config, made=made, **options))
            self._of = of
        try:
            if self.used and self._fleet is not None:
                self._fleet.begin_run()
                made(self._fleet)
            yield self._fleet
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._stack.close()
        self._of = self._fleet = None


def complete(run: Path, steps: int) -> bool:
    """Whether the run in this folder has made its steps."""
    if not (run / METRICS_FILE).exists():
        return False
    return max((row["step"] for row in read_rows(run / METRICS_FILE) if "reward/mean" in row), default=0) >= steps


class Ended(Enum):
    """How a run did."""

    COMPLETE = auto()
    """Perhaps before."""
    FAILED = auto()
    STOPPED = auto()
    """It was asked to, and so is its lane: the run may be complete nevertheless."""
    NO_ROOM = auto()
    """Not begun: the lane has to take another part of the GPU's memory first."""


RETRY = 2.0
"""Seconds for which a lane waits for memory before it looks whether the run is still to be made."""


def run_lane(jobs: Iterable[Job], out: Path, until: float, share: GpuShare) -> int:
    """Run what is left of `jobs` and nobody runs, in this process, as rank 0 of one; 1 where a run failed. One that
    failed with engines of its own, in a lane with the same `until`, is not tried again.

    until  of `time.monotonic`: then nothing is started, and what runs is asked to stop
    share  of the GPU's memory: it takes what a run needs
    """
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    engines, failed = KeptEngines(), False
    try:
        for job in jobs:
            ended = _claim_and_run(job, out, engines, until, share)
            while ended is Ended.NO_ROOM:  # the run is nobody's meanwhile: a lane that has the room takes it
                engines.close()
                empty_cache()
                share.take(job.gib, min(until, time.monotonic() + RETRY))
                ended = _claim_and_run(job, out, engines, until, share)
            failed = failed or ended is Ended.FAILED
            if ended is Ended.STOPPED:
                break
    finally:
        engines.close()
    return int(failed)


def _claim_and_run(job: Job, out: Path, engines: KeptEngines, until: float, share: GpuShare) -> Ended | None:
    """None where another lane has the run."""
    with _claimed(out / f"{job.folder}.lock") as lock:
        if lock is None:
            return None
        if lock.read() == str(until):
            return Ended.FAILED
        ended = _run(job, out, engines, until, share)
        if ended is Ended.FAILED and engines.used and time.monotonic() < until:
            ended = _run(job, out, engines, until, share)  # with engines of its own
        if ended is Ended.FAILED:
            lock.truncate(0)
            lock.write(str(until))
        return ended


@contextmanager
def _claimed(file: Path) -> Iterator[IO[str] | None]:
    """The run's lock, to be read from its beginning, where nobody else has the run; it is ours inside."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            lock.seek(0)
            yield lock


def _run(job: Job, out: Path, engines: KeptEngines, until: float, share: GpuShare) -> Ended:
    run, engines.used = out / job.folder, False
    stop, ended, started = StopRequest(run), Ended.FAILED, time.monotonic()
    with open(out / f"{job.folder}.log", "a") as log, redirect_stdout(log), redirect_stderr(log):
        try:
            config = job.configuration(out)
            if complete(run, config.trainer.steps):
                return Ended.COMPLETE
            if time.monotonic() >= until:
                return Ended.STOPPED
            if not share.fits(job.gib):
                return Ended.NO_ROOM
            if job.model is None:
                job.made.ensure()
            if finished_states(run / CHECKPOINTS):
                config = job.configuration(out, "trainer.resume=true")
            else:
                shutil.rmtree(run, ignore_errors=True)
            started = time.monotonic()
            timer = Timer(until - started, (run / REQUEST).touch)
            timer.daemon = True
            timer.start()
            try:
                train(config, engines, stop)
            finally:
                timer.cancel()
            ended = Ended.COMPLETE if complete(run, config.trainer.steps) and not stop.reason else Ended.STOPPED
        except Exception:
            traceback.print_exc()
    gc.collect()  # the model and its optimizer refer to each other
    said = f" failed: {log.name}" if ended is Ended.FAILED else ""
    print(f"{time.monotonic() - started:5.0f} s: {job.folder}{said}", flush=True)
    return ended
