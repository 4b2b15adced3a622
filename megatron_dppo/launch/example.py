"""What every example script does: make its model once, then train on all ranks, however it was started; those of the
paper's experiments choose a configuration as well."""

from __future__ import annotations

import argparse
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

from megatron_dppo.errors import UserError, file_errors
from megatron_dppo.launch.local import launch_local
from megatron_dppo.launch.nodes import ranks_in_all_and_here
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
        with file_errors(f"cannot write {self.folder}", "choose another folder"):
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
    torchrun that was given no options, it makes the model, then starts `processes` ranks of the same `script`. Before a
    model is made `main` checks the configuration (`--check`).
    `settings` are the variables that name this run: with them the closing line after an interruption says how to go on.
    A run that lost a rank is started again from its newest state, MAX_RESTARTS times without a new one in between.
    """
    # The command that goes on is right in any folder.
    settings = {name: value.absolute() if isinstance(value, Path) else value for name, value in settings.items()}
    extra = sys.argv[1:]
    given = extra if overrides is None else overrides

    def make(check: Callable[[Sequence[str]], int]) -> int:
        """The model, where it is absent, for a configuration that is in order. Returns the exit status."""
        status = 0 if model.folder.exists() else check([*arguments, *given, "--check"])
        if not status:
            model.ensure()
        return status

    def rank() -> int:
        return make(main) or main([*arguments, *given])

    def launch() -> int:
        if wrong := next((word for word in given if word.startswith("-") or "=" not in word), None):
            raise UserError(f"{wrong}: not an option of {script} or a.b=c; the lines at its top name its options")
        if processes == "0" and not os.environ.get("NPROC"):
            raise UserError("no GPU is seen here, and the experiment is one for GPUs; NPROC=1 tries it on a CPU")
        if not processes.isdecimal() or int(processes) < 1:
            raise UserError(f"NPROC={processes}: must be the number of ranks, 1 or more")
        restarts = Restarts(_run_folder(settings, extra), limit=max_restarts())
        if status := make(main if "LOCAL_RANK" in os.environ else _apart):  # torchrun is told by its own process
            return status
        os.environ.update(
            {name: str(value) for name, value in settings.items()}
        )  # the ranks' folder is the one we name
        variables = [f"{name}={shlex.quote(str(value))}" for name, value in settings.items()]
        again = " ".join([*variables, "bash", *map(shlex.quote, [script, *extra]), "trainer.resume=true"])
        on_stop = f"To go on from the last checkpoint, if there is one: {again}"
        command = [sys.executable, "-u", script, *extra]
        return launch_local(command, processes=int(processes), on_stop=on_stop, restarts=restarts)

    sys.exit(exit_status(rank if "LOCAL_RANK" in os.environ and not _bare_torchrun(script) else launch))


def _apart(words: Sequence[str]) -> int:
    """The exit status of our command. What it imports, half a gigabyte, would stay in a launcher for the whole run."""
    return subprocess.run([sys.executable, "-m", "megatron_dppo.cli", *words], check=False).returncode


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


_TRIAL = (
    "model.random_weights=true",
    "task.kind=reasoning-gym",  # the experiment's questions are a download too
    "task.dataset=chain_sum",
    "task.data=null",
    "task.rewards=[{kind: python, path: 'megatron_dppo.launch.example:coin'}]",
    "evaluation.every=0",
    "evaluation.sets=[]",
    "rollout.max_response_tokens=1024",
    "rollout.tensor_parallel=1",
    "trainer.steps=5",
    "trainer.prompts_per_step=32",
    "trainer.samples_per_prompt=8",
    "trainer.prompts_per_mini_batch=16",
    "trainer.checkpoint_every=0",
    "trainer.export_hugging_face=false",
)
"""What `--random-weights` sets, before the command line's own overrides."""


def coin(**unused: object) -> float:
    """0 or 1 at random. No answer of random weights is right, and where all rewards of a group are equal its advantages
    are 0 and no backward of the LM head is computed: a step would seem faster than it is. Its answers tell nothing
    apart: hardly an id of the published vocabulary is one of the byte-level tokenizer's, so that many are empty."""
    return float(os.urandom(1)[0] % 2)


def run_experiment(
    main: Callable[[Sequence[str]], int], models: Mapping[str, str], *, script: str, shapes: Mapping[str, str] = {}
) -> None:
    """Run `examples/paper/EXPERIMENT.yaml` on all ranks and exit, see `run_example`.

    models  experiments of `script`, each with the hub's name of its model; the first is the default
    shapes  for `--random-weights`: the tool that writes the model's folder without weights, by the model's name

    The variables EXPERIMENT, MODEL_DIR, RUN_DIR, SEED, NPROC and the options are described at the top of the scripts.
    """
    from torch.cuda import device_count

    root = Path(script).resolve().parent.parent
    experiment = os.environ.get("EXPERIMENT", next(iter(models)))
    if experiment not in models:
        raise SystemExit(exit_status(lambda: _refuse(f"EXPERIMENT={experiment} is none of {', '.join(models)}")))
    name = models[experiment].rsplit("/", 1)[-1]
    trial, overrides = _options(sys.argv[1:])
    ranks, here = ranks_in_all_and_here()
    if "RUN_DIR" not in os.environ and here < ranks:
        why = "RUN_DIR is not set, and by default each node would have a folder of its own; name one that all see"
        raise SystemExit(exit_status(lambda: _refuse(why)))
    run = Path(os.environ.get("RUN_DIR", root / f"runs/{experiment}/{job_stamp()}"))
    seed = os.environ.get("SEED", "0")
    model: Downloaded | MadeOnce
    settings: list[str] = []
    if trial.random_weights:
        if models[experiment] not in shapes:
            raise SystemExit(exit_status(lambda: _refuse(f"--random-weights: no shapes of {name} here")))
        size = [] if trial.layers is None else ["--layers", str(trial.layers)]
        suffix = "" if trial.layers is None else f"-{trial.layers}-layers"
        folder = Path(os.environ.get("MODEL_DIR", root / "models" / f"{name}-shapes{suffix}"))
        model = MadeOnce(folder, [str(root / shapes[models[experiment]]), "{out}", *size])
        settings = [*_TRIAL, *_parallel(ranks)]
    elif trial.layers is not None:
        raise SystemExit(exit_status(lambda: _refuse("--layers goes with --random-weights: a checkpoint has its own")))
    else:
        folder = Path(os.environ.get("MODEL_DIR", root / "models" / name))
        model = Downloaded(folder, models[experiment])
    config = root / "examples/paper" / f"{experiment}.yaml"
    run_example(
        main,
        ["train", str(config), f"model.path={folder}", f"run.dir={run}", f"run.seed={seed}", *settings],
        script=script,
        processes=os.environ.get("NPROC") or str(device_count()),
        model=model,
        settings={"EXPERIMENT": experiment, "SEED": seed, "MODEL_DIR": folder, "RUN_DIR": run},
        overrides=overrides,
    )


def _options(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our options, and the overrides among them, in order."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--layers", type=int)
    return parser.parse_known_args(arguments)


def _parallel(ranks: int) -> list[str]:
    """Sizes for a trial on any number of GPUs; the experiment's own are for 32."""
    tensor = next(size for size in (4, 2, 1) if ranks % size == 0)
    expert = next(size for size in (8, 4, 2, 1) if ranks % size == 0)
    return [
        f"parallel.tensor={tensor}",
        f"parallel.expert={expert}",
        f"parallel.sequence_parallel={'true' if tensor > 1 else 'false'}",
    ]


def _refuse(why: str) -> int:
    raise UserError(why)
