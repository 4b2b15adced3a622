"""Folders and files that appear whole or not at all, and room for them."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from megatron_dppo.errors import UserError
from megatron_dppo.launch.folders import existing, require_writable

INCOMPLETE = ".incomplete-"
_CHECKPOINT_MARKS = ("config.json", "state.json", "latest", "adapter_config.json", "latest_checkpointed_iteration.txt")


@contextlib.contextmanager
def whole_folder(path: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A folder to fill in place of `path`: renamed to it when the block ends well, removed when it fails.

    It sits beside `path` as `.NAME.incomplete-...`, so that a killed process leaves nothing that looks finished.
    """
    check_target(path, overwrite=overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.parent / f".{path.name}{INCOMPLETE}{secrets.token_hex(4)}"
    partial.mkdir()
    try:
        yield partial
        sync(partial)
        publish(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def check_target(path: Path, *, overwrite: bool) -> None:
    """`UserError` where `path` cannot become a new folder."""
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file, not a folder; choose another output")
    if path.is_dir() and any(path.iterdir()):
        if not overwrite:
            raise UserError(f"{path} exists and is not empty; remove it or choose another output")
        if not any((path / mark).is_file() for mark in _CHECKPOINT_MARKS):
            raise UserError(
                f"{path} is no checkpoint folder and is not overwritten; remove it or choose another output"
            )
    require_writable(path.parent, named=str(path))


def require_room(path: Path, needed: int) -> None:
    """`UserError` where the disk has less than the bytes that `path` will take."""
    there = existing(path)
    free = shutil.disk_usage(there).free
    if free < needed:
        raise UserError(f"{path} needs {needed / 1e9:.2f} GB, {there} has {free / 1e9:.2f} GB free; make room")


def publish(partial: Path, path: Path) -> None:
    """Rename `partial` to `path`; a folder already there goes away after the new one is in place."""
    old = set_aside(path)
    partial.rename(path)
    sync(path.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def set_aside(path: Path) -> Path | None:
    """Rename what is at `path` to a hidden name beside it, which is returned; None where nothing is."""
    if not path.exists():
        return None
    old = path.parent / f".{path.name}.replaced-{secrets.token_hex(4)}"
    path.rename(old)
    return old


def sync(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(file: Path, text: str) -> None:
    """Write and flush to the disk. A lone surrogate becomes its escape, which JSON reads as what it was."""
    with file.open("w", encoding="utf-8", errors="backslashreplace") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())


def replace_synced(file: Path, text: str) -> None:
    """The same for a file that may be there: whoever reads it, also after a crash, finds the old text or the new."""
    partial = file.with_name(f".{file.name}.new")
    write_synced(partial, text)
    partial.replace(file)
    sync(file.parent)
