"""Rows of files and datasets, each with the place it came from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from megatron_dppo.config_base import at_home
from megatron_dppo.errors import UserError, first_line, of_file
from megatron_dppo.tasks.data.config import DataConfig

_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".json.gz", ".json.zst", ".parquet")
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Words in the names of files and folders that say what they hold, as `datasets` reads them."""
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
    path = at_home(config.path)
    if path.is_dir() and any((path / name).exists() for name in _SAVED):
        yield from _saved_dataset(config, path)
    elif path.is_dir():
        for file in files_of_split(path, config.split):
            yield from _file(file)
    elif path.is_file():
        yield from _file(path)
    elif _is_read(path) or path.is_absolute() or config.path.startswith(("./", "../")):
        raise UserError(f"{path}: no such file or folder")
    else:
        yield from _hub(config)


def files_of_split(folder: Path, split: str) -> list[Path]:
    """The files under `folder` in the order of their names, hidden ones (`.ipynb_checkpoints`) left out. Where names
    say what is inside (`train-00000-of-00002.parquet`, `test/1.json`) those of `split`, else all.

    Raises UserError where there is none.
    """
    files = [file for file in _shown(folder) if _is_read(file)]
    if not files:
        raise UserError(f"{folder}: holds no {', '.join(_SUFFIXES)} file")
    found = {file: split_of(str(file.relative_to(folder)), split) for file in files}
    if not any(found.values()):
        return files
    chosen = [file for file in files if found[file] == split]
    if not chosen:
        there = ", ".join(sorted({name for name in found.values() if name}))
        raise UserError(f"{folder}: has no file of the split {split!r}, by their names it has {there}; set data.split")
    return chosen


def unread(config: DataConfig) -> list[str]:
    """Files in the folder `config.path`, if it is one of files, that hold no rows that can be read: `b.csv`."""
    folder = at_home(config.path)
    if not folder.is_dir() or any((folder / name).exists() for name in _SAVED):
        return []
    about = re.compile(r"(?:readme|license|\w+$)|.*\.(?:md|py|sh|ya?ml)$", re.IGNORECASE)
    return [str(file) for file in _shown(folder) if not _is_read(file) and not about.match(file.name)]


def _shown(folder: Path) -> list[Path]:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return [file for file in files if not any(part.startswith(".") for part in file.relative_to(folder).parts)]


def _is_read(file: Path) -> bool:
    return file.name.lower().endswith(_SUFFIXES)


def split_of(name: str, wanted: str) -> str | None:
    """The split that a file's name tells, in the word `wanted` where that is one for it; None where it tells none. The
    file's own name goes before those of its folders."""
    for part in reversed(Path(name).parts):
        words = re.split(r"[\W_\d]+", part.casefold())
        if wanted.casefold() in words or wanted in (part, part.split(".")[0]):
            return wanted
        for split, synonyms in _SPLITS.items():
            if any(word in synonyms for word in words):
                return wanted if wanted == split or wanted in synonyms else split
    return None


def _file(path: Path) -> Iterator[Row]:
    if not _is_read(path):
        raise UserError(f"{path}: is none of {', '.join(_SUFFIXES)}")
    kind = (path.with_suffix("") if path.suffix.lower() in _COMPRESSIONS else path).suffix.lower()
    try:
        yield from {".jsonl": _json_lines, ".json": _json, ".parquet": _parquet}[kind](path)
    except OSError as error:
        raise of_file(error, f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text: {error}") from error


def _open(path: Path) -> IO[bytes]:
    """The file's bytes, decompressed by its name."""
    import pyarrow

    return pyarrow.input_stream(str(path), compression=_COMPRESSIONS.get(path.suffix.lower()))


def _json_lines(path: Path) -> Iterator[Row]:
    import io

    with _open(path) as stream, io.TextIOWrapper(stream, encoding="utf-8-sig") as lines:  # without a byte-order mark
        for number, line in enumerate(lines, start=1):
            where = f"{path}, line {number}"
            if not line.strip():
                yield Row(where, None)
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{where}: not valid JSON: {_reason(error)}") from error
            yield Row(where, _object(value, where))


def _reason(error: Exception) -> str:
    return "nested too deep" if isinstance(error, RecursionError) else str(error)


def _json(path: Path) -> Iterator[Row]:
    """One object, a list of objects, or JSON lines under that name, as `datasets` writes them."""
    try:
        with _open(path) as stream:
            value = json.loads(stream.read().decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # a whole value, and something behind it
            yield from _json_lines(path)
            return
        raise UserError(f"{path}, line {error.lineno}: not valid JSON: {error}") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise
        raise UserError(f"{path}: not valid JSON: {_reason(error)}") from error
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
        raise UserError(
            f"{config.path}: neither a file here nor a dataset of the Hugging Face hub that can be loaded "
            f"(split {config.split!r}): {first_line(error)}"
        ) from error
    yield from _numbered(dataset, config.path)


def _numbered(dataset: Any, name: str) -> Iterator[Row]:
    for number, values in enumerate(dataset, start=1):
        yield Row(f"{name}, row {number}", values)


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f'{where}: a row must be an object ({{"problem": ..., "answer": ...}}), not {value!r:.60}')
    return value
