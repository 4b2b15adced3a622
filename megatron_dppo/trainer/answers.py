"""Answers of an evaluation on disk, so that one that was stopped goes on where it was."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dppo.errors import UserError, file_errors
from megatron_dppo.trainer.history import complete_lines


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer to one question, scored."""

    prompt: int
    """Number of the question in its set."""
    sample: int
    correct: bool
    well_formed: bool
    tokens: int
    finish_reason: str
    response: str


class AnswerFile:
    """A JSONL file: the settings under which its answers were sampled, then an answer a line.

    Opening it reads what is there, without an incomplete last line; a file without an answer is begun anew. `add` has
    its lines on disk when it returns. Raises UserError where the file holds answers of other settings, or cannot be
    written.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self._answers: dict[tuple[int, int], Answer] = {}
        with file_errors(f"{path}: cannot be written"):
            path.parent.mkdir(parents=True, exist_ok=True)
            whole = self._read(settings) if path.exists() else 0
            self._file = open(path, "r+" if path.exists() else "w", encoding="utf-8")  # noqa: SIM115  (see close)
            self._file.seek(whole)
            self._file.truncate()
            if whole == 0:
                self._write([{"settings": settings}])

    def has(self, prompt: int, samples: int) -> bool:
        """Whether all of a question's answers are there."""
        return all((prompt, sample) in self._answers for sample in range(samples))

    def answers(self, prompt: int, samples: int) -> list[Answer]:
        """A question's answers, in order, without what they say: that is on disk."""
        return [self._answers[prompt, sample] for sample in range(samples)]

    def add(self, answers: Iterable[Answer]) -> None:
        """Write answers; they count from now on."""
        made = list(answers)
        self._write([dataclasses.asdict(answer) for answer in made])
        for answer in made:
            self._remember(answer)

    def close(self) -> None:
        with suppress(OSError):  # what `add` could not write, once more
            self._file.close()

    def _remember(self, answer: Answer) -> None:
        """Half a million long responses would not fit in memory."""
        self._answers[answer.prompt, answer.sample] = dataclasses.replace(answer, response="")

    def _write(self, rows: list[dict[str, Any]]) -> None:
        with file_errors(f"{self.path}: cannot be written"):
            self._file.writelines(json.dumps(row) + "\n" for row in rows)
            self._file.flush()
            os.fsync(self._file.fileno())

    def _read(self, settings: dict[str, Any]) -> int:
        """Take in what the file holds; returns the bytes of its complete lines, 0 where none is an answer."""
        whole = 0
        for number, line in complete_lines(self.path):
            try:
                row = json.loads(line)
                if number == 1:
                    before = dict(row["settings"])
                else:
                    if number == 2:  # an answer of other settings may have other fields
                        self._check(before, settings)
                    self._remember(Answer(**row))
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise UserError(f"{self.path}, line {number}: not an answer of an evaluation: {error!r}") from error
            whole += len(line)
        return whole if self._answers else 0

    def _check(self, before: dict[str, Any], now: dict[str, Any]) -> None:
        changed = [name for name in {**now, **before} if before.get(name) != now.get(name)]
        if changed:
            raise UserError(
                f"{self.path} holds answers of another evaluation ({', '.join(changed)} changed); name another folder "
                "by --out, or remove it"
            )
