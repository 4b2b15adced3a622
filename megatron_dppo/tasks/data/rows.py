"""Rows of files and datasets, each with the place it came from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dppo.errors import UserError
from megatron_dppo.tasks.data.config import DataConfig

_SUFFIXES = (".jsonl", ".json", ".parquet")
_SAVED = ("dataset_info.json", "dataset_dict.json")
"""One of these is in a folder that `datasets` saved."""


@dataclass(frozen=True)
class Row:
    """One row. `where` is what an error names: file and line, or dataset and row, counted from 1."""

    where: str
    values: dict[str, Any] | None
    """None for a blank line."""


def read_rows(config: DataConfig) -> Iterator[Row]:
    """All rows of `config.path`, in order.

    Raises UserError for what does not exist, cannot be read, or holds a row that is no object, by file and line.
    """
    path = Path(config.path)
    if path.is_dir() and any((path / name).exists() for name in _SAVED):
        yield from _saved_dataset(config, path)
    elif path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES)
        if not files:
            raise UserError(f"{path}: holds no {', '.join(_SUFFIXES)} file")
        for file in files:
            yield from _file(file)
    elif path.is_file():
        yield from _file(path)
    elif path.suffix in _SUFFIXES or path.is_absolute() or config.path.startswith(("./", "../")):
        raise UserError(f"{path}: no such file or folder")
    else:
        yield from _hub(config)


def _file(path: Path) -> Iterator[Row]:
    if path.suffix not in _SUFFIXES:
        raise UserError(f"{path}: is none of {', '.join(_SUFFIXES)}")
    try:
        yield from {".jsonl": _json_lines, ".json": _json, ".parquet": _parquet}[path.suffix](path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text: {error}") from error


def _json_lines(path: Path) -> Iterator[Row]:
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path}, line {number}"
            if not line.strip():
                yield Row(where, None)
                continue
            try:
                value = json.loads(line)
            except ValueError as error:
                raise UserError(f"{where}: not valid JSON: {error}") from error
            yield Row(where, _object(value, where))


def _json(path: Path) -> Iterator[Row]:
    """One object, or a list of objects."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}: not valid JSON: {error}") from error
    if not isinstance(value, list):
        yield Row(str(path), _object(value, str(path)))
        return
    for number, item in enumerate(value, start=1):
        where = f"{path}, entry {number}"
        yield Row(where, _object(item, where))


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        for batch in ParquetFile(path).iter_batches():
            for values in batch.to_pylist():
                number += 1
                yield Row(f"{path}, row {number}", values)
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: not a readable Parquet file (after row {number}): {error}") from error


def _saved_dataset(config: DataConfig, path: Path) -> Iterator[Row]:
    from datasets import DatasetDict, load_from_disk

    try:
        dataset = load_from_disk(str(path))
    except (ValueError, OSError) as error:
        raise UserError(f"{path}: not a dataset that can be loaded: {error}") from error
    if isinstance(dataset, DatasetDict):
        if config.split not in dataset:
            raise UserError(f"{path}: has no split {config.split!r}; it has {', '.join(map(str, dataset))}")
        dataset = dataset[config.split]
    yield from _numbered(dataset, str(path))


def _hub(config: DataConfig) -> Iterator[Row]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    try:
        dataset = load_dataset(config.path, config.subset, split=config.split, revision=config.revision)
    except (DatasetNotFoundError, ConnectionError, ValueError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"{config.path}: neither a file here nor a dataset of the Hugging Face hub that can be loaded "
            f"(split {config.split!r}): {reason}"
        ) from error
    yield from _numbered(dataset, config.path)


def _numbered(dataset: Any, name: str) -> Iterator[Row]:
    for number, values in enumerate(dataset, start=1):
        yield Row(f"{name}, row {number}", values)


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f'{where}: a row must be an object ({{"problem": ..., "answer": ...}}), not {value!r:.60}')
    return value
