"""Services that watch runs: Weights & Biases and trackio, each only where it is installed and asked for."""

from __future__ import annotations

import importlib
import sys
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from megatron_dppo.config.trainer import TrackingConfig
from megatron_dppo.errors import UserError, typed_line
from megatron_dppo.launch.secrets import redact


class Sink(Protocol):
    """Takes what `Tracker` logs. `None` is a value that was not finite."""

    def log(self, step: int, values: Mapping[str, float | None]) -> None: ...

    def table(self, step: int, name: str, columns: list[str], rows: list[list[Any]]) -> None: ...

    def close(self) -> None: ...


def require_services(config: TrackingConfig) -> None:
    """Raise `UserError` for a service that is asked for but not installed. Cheap, so that it can be asked first."""
    for name in ("wandb", "trackio"):
        if getattr(config, name):
            _import(name)


def open_sinks(config: TrackingConfig, *, run: str, folder: Path, settings: dict[str, Any], resume: bool) -> list[Sink]:
    """The services of `config`, with the run's whole configuration as its `settings`. Raises UserError for one that
    cannot be opened; those before it are closed."""
    services: dict[str, Callable[[], Sink]] = {
        "wandb": lambda: WandbSink(config.project, run, folder, settings, resume=resume),
        "trackio": lambda: TrackioSink(config.project, run, settings, resume=resume),
    }
    sinks: list[Sink] = []
    for name, service in services.items():
        try:
            if getattr(config, name):
                sinks.append(service())
        except Exception as error:  # no key, no network, no room: of many types
            for sink in sinks:
                with suppress(Exception):  # what could not be opened is what to mend
                    sink.close()
            offline = " (or WANDB_MODE=offline)" if name == "wandb" else ""
            raise UserError(
                f"tracking.{name}=true, but {name} cannot be opened: {typed_line(error)}; mend that, or set "
                f"tracking.{name}=false{offline}"
            ) from error
    return sinks


class WandbSink:
    """A run of Weights & Biases. Its id is kept in the run's folder, so that a resumed run is the same one there.

    Steps are an axis of their own (`step`): W&B drops values below its own last step, which a resumed run has.
    """

    def __init__(self, project: str, run: str, folder: Path, settings: dict[str, Any], *, resume: bool) -> None:
        self._wandb = _import("wandb")
        id_file = folder / "wandb_id.txt"
        if not (resume and id_file.exists()):
            id_file.write_text(uuid.uuid4().hex[:16])
        command, sys.argv = sys.argv, [redact(part) for part in sys.argv]  # W&B keeps it
        try:
            self._run = self._wandb.init(
                project=project,
                name=run,
                id=id_file.read_text(),
                resume="allow",
                dir=str(folder),
                config=settings,
                settings=self._wandb.Settings(console="off"),  # what others print is not free of secrets
            )
        finally:
            sys.argv = command
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        self._run.log({"step": step, **values})

    def table(self, step: int, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        self._run.log({"step": step, name: self._wandb.Table(columns=columns, data=rows)})

    def close(self) -> None:
        self._run.finish()


class TrackioSink:
    """A run of trackio, whose interface is W&B's with an explicit step."""

    def __init__(self, project: str, run: str, settings: dict[str, Any], *, resume: bool) -> None:
        self._trackio = _import("trackio")
        self._trackio.init(project=project, name=run, config=settings, resume="allow" if resume else "never")

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        self._trackio.log({name: value for name, value in values.items() if value is not None}, step=step)

    def table(self, step: int, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        """trackio's tables need pandas; samples are in the run's folder in any case."""

    def close(self) -> None:
        self._trackio.finish()


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"tracking.{name}=true, but {name} cannot be imported ({error}); install it by `uv pip install {name}`, or "
            f"set tracking.{name}=false"
        ) from error
