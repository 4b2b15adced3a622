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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from threading import Timer
from typing import Any

from examples.smollm2.plan import Job
from examples.smollm2.settings import arguments, model
from megatron_dppo.checkpoint.state_folder import finished_states
from megatron_dppo.config.load import load_config
from megatron_dppo.launch.stop import REQUEST
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
        elif self._fleet is not None:
            made(self._fleet)
        try:
            yield self._fleet
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._stack.close()
        self._of = self._fleet = None


def left(job: Job, out: Path) -> tuple[str, ...] | None:
    """What the run needs beside its overrides to begin or go on; None where it is complete."""
    run = out / job.folder
    if not (run / METRICS_FILE).exists():
        shutil.rmtree(run, ignore_errors=True)
        return ()
    done = max((row["step"] for row in read_rows(run / METRICS_FILE) if "reward/mean" in row), default=0)
    if done >= job.steps:
        return None
    if finished_states(run / CHECKPOINTS):
        return ("trainer.resume=true",)
    shutil.rmtree(run)
    return ()


def run_lane(jobs: Sequence[Job], out: Path, until: float) -> int:
    """Run what is left of `jobs` and nobody runs, in this process, as rank 0 of one; 1 where a run failed.

    until  of `time.monotonic`: then nothing is started, and what runs is asked to stop
    """
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    engines, failed = KeptEngines(), False
    try:
        for job in jobs:
            with _claimed(out / f"{job.folder}.lock") as mine:
                if not mine:
                    continue
                done, again = True, True
                while again and time.monotonic() < until and (more := left(job, out)) is not None:
                    done = _run(job, more, out, engines, until)
                    again = not done and engines.used  # with engines of its own
                failed |= not done
                if done and left(job, out) is not None:  # it was asked to stop, and so are we
                    break
    finally:
        engines.close()
    return int(failed)


@contextmanager
def _claimed(file: Path) -> Iterator[bool]:
    """Whether nobody else has the run; it is ours inside."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _run(job: Job, more: Sequence[str], out: Path, engines: KeptEngines, until: float) -> bool:
    started, run, engines.used = time.monotonic(), out / job.folder, False
    stop = Timer(until - started, lambda: (run / REQUEST).touch())
    stop.daemon = True
    stop.start()
    said = ""
    with open(out / f"{job.folder}.log", "a") as log, redirect_stdout(log), redirect_stderr(log):
        try:
            folder = job.model
            if folder is None:
                made = model(job.experts, job.seed, package=os.environ.get("PACKAGE"))
                made.ensure()
                folder = made.folder
            _, config, *settings = arguments(os.environ.get("TASK", "sums"), job.experts, job.seed, folder, run)
            train(load_config(Path(config), [*settings, *job.overrides, *more]), engines)
        except Exception:
            traceback.print_exc()
            said = f" failed: {log.name}"
    stop.cancel()
    gc.collect()  # the model and its optimizer refer to each other
    print(f"{time.monotonic() - started:5.0f} s: {job.folder}{said}", flush=True)
    return not said
