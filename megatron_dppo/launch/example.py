"""What every example script does: make its model once, then train on all ranks, however it was started."""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from megatron_dppo.errors import UserError
from megatron_dppo.launch.local import launch_local
from megatron_dppo.launch.rank import exit_status
from megatron_dppo.launch.restarts import Restarts, max_restarts


def job_stamp() -> str:
    """Start time of the job as `20260131-235959`, the same in every rank of a node: ranks have one parent."""
    launcher = psutil.Process(os.getppid()) if "LOCAL_RANK" in os.environ else psutil.Process()
    return time.strftime("%Y%m%d-%H%M%S", time.localtime(launcher.create_time()))


@dataclass(frozen=True)
class MadeOnce:
    """A folder that `command` (a Python script and its arguments) writes when it is absent.

    `{out}` in the command is where to write: a folder beside the final one, renamed when complete, so that an
    interrupted run leaves nothing that looks finished. Ranks that come at the same time wait for the first.
    """

    folder: Path
    command: Sequence[str]

    def ensure(self) -> None:
        """Errors: `UserError` when the folder cannot be written or the command fails."""
        if self.folder.exists():
            return
        partial, lock_file = (self.folder.with_name(f".{self.folder.name}.{part}") for part in ("partial", "lock"))
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            with open(lock_file, "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if self.folder.exists():
                    return
                command = [sys.executable, *(part.replace("{out}", str(partial)) for part in self.command)]
                shutil.rmtree(partial, ignore_errors=True)
                if subprocess.run(command, check=False).returncode:
                    raise UserError(f"making {self.folder} failed, see above: {' '.join(command)}")
                partial.rename(self.folder)
        except OSError as error:
            raise UserError(f"cannot write {self.folder}: {error.strerror}; choose another folder") from error


@dataclass(frozen=True)
class Downloaded:
    """A checkpoint of the Hugging Face hub that has to be there already: no large model is fetched unasked."""

    folder: Path
    repository: str

    def ensure(self) -> None:
        """Errors: `UserError` with the command that fetches it."""
        if not (self.folder / "config.json").is_file():
            raise UserError(
                f"{self.folder} holds no model; get it by `hf download {self.repository} --local-dir {self.folder}`, "
                "or name the folder that has it: MODEL_DIR=..."
            )


def run_example(
    main: Callable[[Sequence[str]], int],
    arguments: Sequence[str],
    *,
    script: str,
    processes: str,
    model: MadeOnce | Downloaded,
    settings: Mapping[str, object],
    overrides: Sequence[str] | None = None,
) -> None:
    """Run `main([*arguments, *overrides])` on all ranks and exit; the overrides are by default what follows the
    script's name.

    Started by torchrun (or another launcher that sets LOCAL_RANK) this process is one rank. Started alone, or by a
    torchrun that was given no options, it makes the model, then starts `processes` ranks of the same `script`.
    `settings` are the variables that name this run: with them the closing line after an interruption says how to go on.
    A run that lost a rank is started again from its newest state, MAX_RESTARTS times without a new one in between.
    """
    extra = sys.argv[1:]

    def rank() -> int:
        model.ensure()
        return main([*arguments, *(extra if overrides is None else overrides)])

    def launch() -> int:
        if not processes.isdecimal() or int(processes) < 1:
            raise UserError(f"NPROC={processes}: must be the number of ranks, 1 or more")
        model.ensure()
        os.environ.update(
            {name: str(value) for name, value in settings.items()}
        )  # the ranks' folder is the one we name
        variables = [f"{name}={shlex.quote(str(value))}" for name, value in settings.items()]
        again = " ".join([*variables, "bash", *map(shlex.quote, [script, *extra]), "trainer.resume=true"])
        on_stop = f"To go on from the last checkpoint, if there is one: {again}"
        command = [sys.executable, "-u", script, *extra]
        restarts = Restarts(_run_folder(settings, extra), limit=max_restarts())
        return launch_local(command, processes=int(processes), on_stop=on_stop, restarts=restarts)

    sys.exit(exit_status(rank if "LOCAL_RANK" in os.environ and not _bare_torchrun(script) else launch))


def _run_folder(settings: Mapping[str, object], overrides: Sequence[str]) -> Path:
    """Where the ranks train: the last word counts."""
    named = [override.partition("=")[2] for override in overrides if override.startswith("run.dir=")]
    return Path(named[-1] if named else str(settings["RUN_DIR"]))


def _bare_torchrun(script: str) -> bool:
    """Whether torchrun was given nothing but the script (it starts one rank then; we want one per GPU)."""
    if os.environ.get("WORLD_SIZE") != "1" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    command = psutil.Process(os.getppid()).cmdline()
    where = next((i for i, part in enumerate(command) if Path(part).resolve() == Path(script).resolve()), None)
    if where is None:
        return False
    launcher = [part for part in command[:where] if part not in ("-m", "torch.distributed.run")]
    return any("torchrun" in part or "torch.distributed.run" in part for part in command[:where]) and not any(
        part.startswith("-") for part in launcher
    )
