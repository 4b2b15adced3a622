"""Whether a folder can be written: tried by a file, before what takes minutes is begun."""

from __future__ import annotations

import tempfile
from pathlib import Path

from megatron_dppo.errors import of_file


def require_writable(folder: Path, *, named: str, make: bool = False) -> None:
    """Try `folder`, which may be made first, or the nearest above it that is there. Errors: UserError, or SystemFault,
    that calls it `named`."""
    where = ""
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        there = existing(folder)
        where = "" if there == folder else f" in {there}"
        with tempfile.TemporaryFile(dir=there):  # without a name, where the file system has such
            pass
    except OSError as error:
        raise of_file(
            error, f"{named} cannot be written{where}: {error.strerror or error}; choose another folder"
        ) from error


def existing(path: Path) -> Path:
    """`path`, or the nearest folder above it that is there."""
    return next(one for one in (path, *path.absolute().parents) if one.exists())
