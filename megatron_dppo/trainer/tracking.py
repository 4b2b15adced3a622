"""Where metrics go: a JSONL file that scripts read, TensorBoard events that people watch, and services by choice."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from megatron_dppo.checkpoint.atomic import sync
from megatron_dppo.errors import UserError, file_errors, typed_line
from megatron_dppo.launch.secrets import redact
from megatron_dppo.trainer.history import (
    ADAPTER_FOLDER,
    CHECKPOINTS,
    MASKED_TOKENS_FILE,
    METRICS_FILE,
    MODEL_FOLDER,
    SAMPLES_FILE,
    read_lines,
    read_rows,
)
from megatron_dppo.trainer.samples import Sample
from megatron_dppo.trainer.sinks import Sink

logger = logging.getLogger(__name__)


class Tracker:
    """Writes the metrics of a run under `folder`: `metrics.jsonl` and `tensorboard/`. One process of a run has one.

    Each `log` call is one row, `{"step": 7, "reward/mean": 0.4, ...}`, on the disk before the call returns, so that
    neither a crash nor a power cut loses what was logged. Values that are not finite are written as `null`, which JSON
    has, unlike NaN.

    `resume_step` is the last step that the checkpoint in use contains: rows of later steps, which will be made again,
    are removed from both sinks, and so is, with a warning, what a crash left of a last line. Without it the folder must
    not hold metrics yet.

    Errors: `UserError` when the folder cannot be written or already holds another run's metrics. TensorBoard and
    services that fail on the way end no run: each is warned of once, and asked again with the next row.
    """

    def __init__(self, folder: Path, *, resume_step: int | None = None, sinks: Sequence[Sink] = ()) -> None:
        self.path = folder / METRICS_FILE
        self._folder, self._sinks = folder, list(sinks)
        self._failed: set[str] = set()
        with file_errors(f"run.dir={folder}: cannot write metrics there"):
            folder.mkdir(parents=True, exist_ok=True)
            if resume_step is not None:
                for name in (METRICS_FILE, SAMPLES_FILE, MASKED_TOKENS_FILE):
                    _drop_rows_after(folder / name, resume_step)
            else:
                require_unused(folder)
            self.path.open("a").close()
            sync(folder)
            purge = None if resume_step is None else resume_step + 1
            self._events = SummaryWriter(str(folder / "tensorboard"), purge_step=purge, flush_secs=10)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one row. Steps are the caller's; a step may have several rows (training, then evaluation)."""
        if "step" in metrics:
            raise ValueError("Tracker.log: `step` is an argument, not a metric")
        values = {name: float(value) for name, value in metrics.items()}
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._append(METRICS_FILE, [{"step": step, **finite}])
        with self._watched_by(self._events):
            for name, value in values.items():
                self._events.add_scalar(name, value, global_step=step)
        for sink in self._sinks:
            with self._watched_by(sink):
                sink.log(step, finite)

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Append answers to `samples.jsonl`, without secrets (a system prompt may hold one); TensorBoard has them as
        text."""
        samples = [
            dataclasses.replace(
                s,
                prompt=redact(s.prompt),
                response=redact(s.response),
                pieces=s.pieces if redact(s.response) == s.response else [],  # a secret is not seen in its parts
                reference=redact(s.reference),
            )
            for s in samples
        ]
        self._append(SAMPLES_FILE, [{"step": step, **sample.row()} for sample in samples])
        samples = [
            dataclasses.replace(
                s, prompt=encodable(s.prompt), response=encodable(s.response), reference=encodable(s.reference)
            )
            for s in samples
        ]
        text = "\n\n".join(
            f"**reward {s.reward:g}** ({s.tokens} tokens, {s.finish_reason}, reference {s.reference!r})\n\n"
            f"    {_indented(s.prompt)}\n\n    {_indented(s.response)}"
            for s in samples
        )
        with self._watched_by(self._events):
            self._events.add_text("samples", text, global_step=step)
        rows = [[step, s.prompt, s.response, s.reference, s.reward, s.correct, s.tokens] for s in samples]
        columns = ["step", "prompt", "response", "reference", "reward", "correct", "tokens"]
        for sink in self._sinks:
            with self._watched_by(sink):
                sink.table(step, "samples", columns, rows)

    def masked_tokens(self, step: int, tokens: Mapping[str, Sequence[tuple[str, int]]]) -> None:
        """Append the tokens blocked most, with their counts, to `masked_tokens.jsonl`."""
        self._append(MASKED_TOKENS_FILE, [{"step": step, **{sign: list(pairs) for sign, pairs in tokens.items()}}])
        lines = [
            f"{sign}: " + ", ".join(f"{text!r} {count}" for text, count in pairs) for sign, pairs in tokens.items()
        ]
        with self._watched_by(self._events):
            self._events.add_text("masked_tokens", encodable("\n\n".join(lines)), global_step=step)

    @contextmanager
    def _watched_by(self, watcher: object) -> Iterator[None]:
        name = type(watcher).__name__
        try:
            yield
        except Exception as error:  # a network, a full disk, a service's own
            if name not in self._failed:
                logger.warning("%s failed, the run goes on without: %s", name, typed_line(error))
            self._failed.add(name)

    def _append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        path, is_new = self._folder / name, not (self._folder / name).exists()
        with file_errors(f"{path}: cannot write"):
            with open(path, "a", encoding="utf-8") as file:
                file.writelines(encodable(json.dumps(row, ensure_ascii=False)) + "\n" for row in rows)
                file.flush()
                os.fsync(file.fileno())
            if is_new:
                sync(self._folder)

    def has(self, step: int, name: str) -> bool:
        """Whether the file has a value of metric `name` at `step`."""
        return any(row["step"] == step and name in row for row in read_rows(self.path))

    def close(self) -> None:
        watchers: list[Any] = [self._events, *self._sinks]
        for watcher in watchers:
            with self._watched_by(watcher):
                watcher.close()


def require_unused(folder: Path) -> None:
    """Raise `UserError` if `folder` holds the metrics of a run, or a checkpoint or model of one: the run could not put
    its own there at its end. What was never finished (its name begins with a dot) is in nobody's way: a job that was
    killed in its first save begins anew. Cheap, so that it can be asked before a run starts."""
    path = folder / METRICS_FILE
    if path.exists() and path.stat().st_size:
        raise UserError(
            f"run.dir={folder} already holds the metrics of a run; choose another run.dir, or continue it with "
            "trainer.resume=true"
        )
    for name in (CHECKPOINTS, MODEL_FOLDER, ADAPTER_FOLDER):
        inside = (folder / name).iterdir() if (folder / name).is_dir() else ()
        if any(not path.name.startswith(".") for path in inside):
            raise UserError(
                f"run.dir={folder} holds {name}/ of another run; choose another run.dir, or move that folder away"
            )


def encodable(text: str) -> str:
    """The text with `\\ud83d` for half of a surrogate pair, which no encoding has bytes for; JSON has the same escape.
    Text of models and of the web holds such halves."""
    return text.encode("utf-8", "backslashreplace").decode()


def _indented(text: str) -> str:
    return text.replace("\n", "\n    ")


def _drop_rows_after(path: Path, step: int) -> None:
    """Rewrite the file without rows of later steps and without what a crash cut off; all or nothing."""
    if not path.exists():
        return
    whole, partial = 0, path.with_suffix(".partial")
    with open(partial, "wb") as file:
        for line, row in read_lines(path):
            whole += len(line)
            if row["step"] <= step:
                file.write(line)
        file.flush()
        os.fsync(file.fileno())
    if incomplete := path.stat().st_size - whole:
        logger.warning("%s: its last %d bytes are no whole line (a crash cut it off) and are dropped", path, incomplete)
    os.replace(partial, path)
    sync(path.parent)
